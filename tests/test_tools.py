"""`dflash-shards` on small caches: what it prints and how it leaves."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from caches import write_cache
from targets import tokenizer

from dflash_offline.shards import manifest
from dflash_offline.shards.cache import Cache
from dflash_offline.shards.files import file_hash
from dflash_offline.tools.browse import one_line
from dflash_offline.tools.cli import main


def shards(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(sys, "argv", ["dflash-shards", *map(str, args)])
        main()
    out = capsys.readouterr()
    return int(left.value.code or 0), out.out, out.err


def test_info_ls_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=5, tokens=50)
    code, out, _ = shards(capsys, "info", tmp_path / "c")
    assert code == 0 and "5 in 1 shards" in out and "250 (" in out and "raw 192" in out
    code, out, _ = shards(capsys, "ls", tmp_path / "c", "--limit", 2)
    assert code == 0 and out.count("data.jsonl:") == 2 and "3 more" in out
    assert shards(capsys, "ls", tmp_path / "c", "--limit", "-1")[0] == 2
    code, out, _ = shards(capsys, "verify", tmp_path / "c")
    assert code == 0 and "5 samples" in out and "0 faults" in out
    path = tmp_path / "c" / "shards" / "00000000.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = shards(capsys, "verify", tmp_path / "c")
    assert code == 3 and "FAULT" in out and "to mend: dflash-shards repair" in out


def test_show_marks_what_is_supervised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=2, tokens=30)
    folder = tmp_path / "c" / "target"
    tokenizer().save_pretrained(folder)
    cache = Cache(tmp_path / "c")
    code, out, _ = shards(capsys, "show", tmp_path / "c", cache.keys[1][:8])
    sample = cache.read(1)
    text = tokenizer().decode(sample.input_ids[sample.loss_mask == 1].tolist())
    assert code == 0 and f"«{text}»" in out and "layer   1: rms" in out
    code, _, err = shards(capsys, "show", tmp_path / "c", "zz")
    assert code == 2 and "0 samples have a key starting with 'zz'" in err


def test_show_reads_no_text_with_another_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "c", samples=1, complete=False)
    folder, key = tmp_path / "c" / "target", Cache(tmp_path / "c", allow_incomplete=True).keys[0]
    tokenizer().save_pretrained(folder)
    info = manifest.read(tmp_path / "c")
    copied = {p.name: file_hash(p) for p in folder.iterdir()}
    manifest.write(tmp_path / "c", replace(info, target={"copied": copied}))
    assert shards(capsys, "show", tmp_path / "c", key)[0] == 0
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"A":').replace('"b":', '"a":').replace('"A":', '"b":'))
    code, out, err = shards(capsys, "show", tmp_path / "c", key)
    assert code == 1 and f"{path}: missing or changed" in err and out == ""
    path.unlink()
    assert shards(capsys, "show", tmp_path / "c", key)[0] == 1


def test_a_strange_id_stays_on_its_line() -> None:
    assert one_line("a\nb\x1b[31m é\u2028") == r"a\nb\x1b[31m é\u2028"


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cache(tmp_path / "a", samples=4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    code, out, _ = shards(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 0 and "4 samples in both, 0 with other states; 0 differences" in out
    write_cache(tmp_path / "c", samples=4, codec="ecsq")
    code, out, _ = shards(capsys, "diff", tmp_path / "a", tmp_path / "c")
    assert code == 3 and "setting codec: 'lossless' and 'ecsq'" in out and "4 with other states" in out
    write_cache(tmp_path / "d", samples=5)
    code, out, _ = shards(capsys, "diff", tmp_path / "a", tmp_path / "d", "--limit", 1)
    assert code == 3 and "only in" in out
    assert shards(capsys, "diff", tmp_path / "a", tmp_path / "d", "--limit", "-1")[0] == 2


def test_a_changed_copy_of_the_target_is_refused_where_it_is_read(tmp_path: Path) -> None:
    write_cache(tmp_path / "c", samples=1)
    path = tmp_path / "c" / "target" / "target.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match=r"target\.safetensors: missing or changed"):
        Cache(tmp_path / "c").target_tensors()
    assert manifest.read(tmp_path / "c").target["copied"]["target.safetensors"] != file_hash(path)
