"""``python -m kafkamq.cli``: the program, from whatever interpreter runs this."""

from kafkamq.cli import main

if __name__ == "__main__":
    main()
