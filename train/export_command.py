"""`dflash-train export`: a run's checkpoint as a folder for servers, with its card, and checked if asked for."""

from dflash_offline.shards.errors import RunError
from dflash_offline.train.card import card
from dflash_offline.train.config import ExportConfig
from dflash_offline.train.export import export_drafter, run_drafter
from dflash_offline.train.export_check import check_export, require_client
from dflash_offline.train.folder import read_config
from dflash_offline.train.mix import Mix


def export(config: ExportConfig) -> int:
    """The command. With `check`, a folder that is there already is only checked."""
    run = read_config(config.run_dir)
    drafter, step = run_drafter(config.run_dir, config.step, config.best)
    paths = [config.cache] if config.cache else [run.cache, *run.data.caches]
    cache = Mix(paths) if config.check else None
    if cache:
        require_client()
    there = config.check and config.out.exists()
    if not there:
        export_drafter(drafter, config.out, card(config.run_dir, run, drafter.spec, step, config.out.name))
        print(f"step {step} of {config.run_dir} written to {config.out}")
    if cache:
        try:
            said = check_export(config.out, drafter, cache)
        except RunError as error:
            raise RunError(f"{error}; compared with step {step} of {config.run_dir}") from None
        if there:
            print(f"{config.out}: checked, not written; it is step {step} of {config.run_dir}")
        print(said)
    return 0
