"""Encoding a whole row and cutting it gives the bytes of encoding every frame alone."""

import pytest
import torch
from codec_reference import hostile

from dflash_offline.extract.encode import Encoder
from dflash_offline.shards import calibration, codecs
from dflash_offline.shards.frames import encode_frames

LENGTHS, COUNTS = (1, 300, 128, 129), (0, 200, 1, 127)


@pytest.mark.parametrize("delta", [2**-3.5, 1.0])
@pytest.mark.parametrize("name", list(codecs.CODECS))
def test_a_cut_row_equals_its_frames(name: str, delta: float) -> None:
    states_PLD = hostile(sum(LENGTHS), 3, 33, 0)
    last_ND = hostile(sum(COUNTS), 1, 33, 1)[:, 0]
    parameters = {"delta": delta} if name == "ecsq" else {}
    made = calibration.Calibrated(
        states=codecs.calibrate(name, hostile(64, 3, 33, 2), parameters),
        last=codecs.calibrate(name, hostile(64, 1, 33, 3), parameters),
        layers=3,
        hidden=33,
        quality={},
        device=torch.device("cpu"),
    )
    encoder = Encoder(made, made.device)
    found = [future.result() for future in encoder(states_PLD, LENGTHS, last_ND, COUNTS)]
    encoder.close()
    assert made.last is not None
    pieces = zip(states_PLD.split(LENGTHS), last_ND.split(COUNTS), strict=True)
    escapes = 0
    for (frames, last_frames), (piece_TLD, last_TD) in zip(found, pieces, strict=True):
        assert frames == encode_frames(made.states, piece_TLD)
        assert last_frames == encode_frames(made.last, last_TD[:, None])
        escapes += sum(len(made.states.encode(piece_TLD)[-1]) for _ in [0] if name == "ecsq")
    assert name != "ecsq" or escapes > 0  # the hostile states have some, or this would not test them
