"""Three workers on real servers, many keys, and faults of all kinds at once, for hours."""
