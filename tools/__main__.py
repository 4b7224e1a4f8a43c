"""`python -m dflash_offline.tools`."""

from dflash_offline.tools.cli import main

if __name__ == "__main__":
    main()
