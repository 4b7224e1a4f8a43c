"""`torchrun --nproc-per-node N -m dflash_offline.train run ...`."""

from dflash_offline.train.cli import main

if __name__ == "__main__":
    main()
