"""`python -m pearl`, as torchrun calls it."""

from pearl.cli import main

if __name__ == "__main__":
    main()
