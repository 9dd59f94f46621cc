"""Changes the library by one token at a time, and shows which changes no test notices."""
