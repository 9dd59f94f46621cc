"""``python -m example_project.demo`` is ``make demo``."""

from example_project.demo.invoices import main

if __name__ == "__main__":
    main(standalone_mode=False)
