"""`dflash-shards repair`: salvage what is sound of a damaged cache."""

from dflash_offline.shards.repair import AGAIN, repair
from dflash_offline.tools.browse import threads_to_read
from dflash_offline.tools.config import Repair


def mend(args: Repair) -> int:
    """Mend the cache: 0 when it is sound now, 3 when samples were lost, 1 when damage is left."""
    done = repair(args.cache, threads_to_read(), dry_run=args.dry_run, delete=args.delete)
    for fault in done.left:
        print(f"NOT MENDED {fault}")
    if done.lost:
        print(f"{done.lost} samples lost: {AGAIN} to extract them again, or go on without them")
    if not done.changes and not done.left:
        print(f"{args.cache}: nothing to mend")
    if args.dry_run and done.changes:
        print("dry run: nothing was changed")
    return 1 if done.left else 3 if done.lost else 0
