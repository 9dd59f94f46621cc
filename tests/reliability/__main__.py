"""``python -m tests.reliability``: write the tables of the page from the recorded runs."""

from tests.reliability.page import PAGE, write

if __name__ == "__main__":
    write()
    print(PAGE)
