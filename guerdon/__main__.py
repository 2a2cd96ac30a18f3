"""`python -m guerdon`: the command, where its script is not on the path."""

from guerdon.cli import command

if __name__ == "__main__":
    command()
