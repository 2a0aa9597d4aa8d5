"""The runner of documentation pages: the blocks that it finds and runs, and the outputs that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.blocks import blocks, shown
from tests.pages.record import recorded
from tests.pages.runner import alike, lay_down, run, summary_of

PAGE = """
<!-- file: told/words.txt -->
```text
three words here
```

```{toctree}
other.md
```

```sh
wc -w < told/words.txt
```

<!-- output -->
```text
stale
```

<!-- run: slow, exit 3 -->
```sh
exit 3
```

<!-- run: by tests/test_ci.py -->
```sh
false
```

```python
print(open("told/words.txt").read().split()[0])
```

<!-- output -->
```text
stale
```
"""


def test_a_page_without_blocks_is_recorded_as_it_stands(tmp_path: Path) -> None:
    assert recorded("# Words\n", tmp_path, slow=True) == "# Words\n"


def test_blocks_are_what_stands_between_fences() -> None:
    assert [block.language for block in blocks(PAGE)] == [
        "text",
        "{toctree}",
        "sh",
        "text",
        "sh",
        "sh",
        "python",
        "text",
    ]
    assert [block.runs for block in blocks(PAGE)] == [False, False, True, False, True, False, True, False]
    slow = blocks(PAGE)[4]
    assert (slow.slow, slow.status, blocks(PAGE)[5].by) == (True, 3, "tests/test_ci.py")
    assert PAGE.splitlines()[slow.line] == slow.text


def test_outputs_belong_to_the_block_before_them() -> None:
    assert [(before.language, after.text) for before, after in shown(PAGE)] == [("sh", "stale"), ("python", "stale")]


def test_outputs_are_written_where_they_stand_and_nothing_else(tmp_path: Path) -> None:
    assert recorded(PAGE, tmp_path, slow=True) == PAGE.replace("stale", "3", 1).replace("stale", "three", 1)


def test_what_is_recorded_into_an_empty_block_leaves_its_fence_alone(tmp_path: Path) -> None:
    assert recorded(PAGE.replace("stale\n", ""), tmp_path, slow=True) == recorded(PAGE, tmp_path, slow=True)


def test_a_status_that_the_page_does_not_tell_stops_the_recording(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit status 3, but the page says 0"):
        recorded(PAGE.replace(", exit 3", ""), tmp_path, slow=True)


def test_the_first_failing_line_of_a_block_ends_it(tmp_path: Path) -> None:
    (block,) = blocks("```sh\nfalse\necho on\n```\n")
    assert run(block, tmp_path) == (1, "")


def test_files_are_laid_down_with_their_folders(tmp_path: Path) -> None:
    lay_down(blocks(PAGE)[0], tmp_path)
    assert (tmp_path / "told" / "words.txt").read_text() == "three words here\n"


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("mean 6.50 of 12, 1,234 tokens", True),
        ("mean  6.51 of 12,\n1,234 tokens", True),  # a different last digit, different blanks
        ("mean 6.80 of 12, 1,234 tokens", False),
        ("mean 6.50 of 12, 1,234 words", False),
        ("mean 6.50 of 12", False),
    ],
)
def test_outputs_are_alike_where_words_are_equal_and_numbers_near(printed: str, same: bool) -> None:
    assert alike("mean 6.50 of 12, 1,234 tokens", printed) is same


def test_the_end_of_a_suite_run_begins_with_our_first_table() -> None:
    assert summary_of("....\n=== warnings ===\n==== emad gates ====\nEMAD-F1\n1 passed\n") == (
        "==== emad gates ====\nEMAD-F1\n1 passed"
    )
    with pytest.raises(ValueError, match="no table of emad"):
        summary_of("1 passed")
