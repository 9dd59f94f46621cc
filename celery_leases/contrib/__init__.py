"""At home in web frameworks: a module for each, imported by whoever uses that framework."""
