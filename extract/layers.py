"""Which layers feed the drafter. Ids are 0-based decoder layers; a feature is the residual stream after that layer."""

from collections.abc import Sequence

from dflash_offline.shards.errors import UsageError


def layer_rule(num_layers: int, features: int) -> tuple[int, ...]:
    """The DFlash rule: `features` ids evenly spaced from 1 to num_layers - 3, rounded half to even."""
    if features == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (features - 1)) for i in range(features))


def choose_layers(requested: Sequence[int], features: int, num_layers: int) -> tuple[int, ...]:
    """The captured layers, checked against the target's depth. Raises UsageError naming what does not fit."""
    layers = tuple(requested) or layer_rule(num_layers, features)
    bad = [i for i in layers if not 0 <= i < num_layers]
    if bad:
        raise UsageError(
            f"target.layers: {', '.join(map(str, bad))} out of range; the target has layers 0 to {num_layers - 1}"
        )
    if len(set(layers)) != len(layers):
        how = "as given" if requested else f"by the rule for {features} features of {num_layers} layers"
        raise UsageError(f"target.layers: {list(layers)} {how} has duplicates; name distinct layers in target.layers")
    return layers
