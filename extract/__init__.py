"""Target model + dataset -> shards. Never imports `train`."""
