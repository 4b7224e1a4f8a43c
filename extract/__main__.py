"""`python -m dflash_offline.extract`."""

from dflash_offline.extract.cli import main

if __name__ == "__main__":
    main()
