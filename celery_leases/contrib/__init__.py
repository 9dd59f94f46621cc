"""Web frameworks: a module for each, which a project of that framework imports."""
