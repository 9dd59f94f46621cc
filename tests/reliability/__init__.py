"""What the long runs have shown: each command writes a file here, and the page is made of them."""
