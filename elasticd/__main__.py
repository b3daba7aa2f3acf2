"""`python -m elasticd`: the command line, for whoever has the interpreter but not its scripts on PATH."""

from elasticd.cli import main

if __name__ == "__main__":
    main()
