"""How fast a dataset becomes a plan, beside the tokenizer alone in the same process."""

import json
import random
import time
from pathlib import Path

import pytest
from qwen import renderer, take


@pytest.mark.slow  # a rate, which other tests beside it would decide
def test_planning_keeps_most_of_the_tokenizer_s_rate(tmp_path: Path) -> None:
    """Rendering, masks, keys, counting and writing: at least 0.6 of bare encode_batch on texts of 2,000 tokens."""
    using, generator = renderer(preserve_thinking=True), random.Random(0)
    words = (Path(__file__).read_text() + Path(json.__file__).read_text()).split()

    def text(count: int) -> str:
        return " ".join(generator.choices(words, k=count))

    path = tmp_path / "d.jsonl"
    with path.open("w") as file:
        for _ in range(200):
            turns = [{"role": "user", "content": text(100)}, {"role": "assistant", "content": text(420)}]
            turns += [{"role": "user", "content": text(100)}, {"role": "assistant", "content": text(370)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    ours, bare, tokens = [], [], 0
    for n in range(3):
        start = time.perf_counter()
        plan = take(tmp_path / str(n), using, path, workers=1, task_tokens=42_000, preserve_thinking=True).plan
        ours.append(time.perf_counter() - start)
        rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
        texts = [using.tokenizer.apply_chat_template(row, tokenize=False, preserve_thinking=True) for row in rows]
        start = time.perf_counter()
        encodings = using.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        bare.append(time.perf_counter() - start)
        tokens = sum(len(e.ids) for e in encodings)
        assert tokens == sum(task.tokens for task in plan.tasks)
    print(
        f"{tokens / len(rows):.0f} tokens a row, {tokens / min(ours):,.0f} tok/s, bare {tokens / min(bare):,.0f} tok/s"
    )
    assert tokens / len(rows) > 1800 and min(bare) / min(ours) > 0.6
