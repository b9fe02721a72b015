# SPDX-License-Identifier: Apache-2.0
"""Progress bars on a terminal, plain lines otherwise; always on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from b12x_overlay.console import Console


class Task:
    """One measurement's progress."""

    def __init__(
        self, owner: Progress, name: str, total: int, done: int, bar: TaskID | None
    ) -> None:
        self._owner = owner
        self._name = name
        self._total = total
        self._done = done
        self._bar = bar

    def advance(self, note: str) -> None:
        """One more step is done; *note* is its figure."""
        self._done += 1
        if self._owner.bars and self._bar is not None:
            self._owner.bars.update(self._bar, advance=1, note=note)
        elif (
            self._total <= 25
            or self._done == self._total
            or self._done % max(1, self._total // 10) == 0
        ):
            self._owner.line(f"{self._name}: {self._done}/{self._total}  {note}")


class Progress:
    """Where measurements report."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self.bars: Bars | None = None
        self._prefix = ""
        plain = console.paint("x", "bold", sys.stderr) == "x"  # --color, NO_COLOR
        if sys.stderr.isatty() and not quiet:
            self.bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=RichConsole(stderr=True, no_color=plain),
            )

    def __enter__(self) -> Progress:
        if self.bars:
            self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars:
            self.bars.stop()

    def block(self, title: str) -> None:
        """Announce a block; its name goes before every line that follows."""
        self._prefix = f"[{title}] "

    def line(self, text: str) -> None:
        """One plain line; above the bars where there are any."""
        if self.bars:
            self.bars.console.print(escape(self._prefix + text), soft_wrap=True, highlight=False)
        else:
            self._console.progress(self._prefix + text)

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Task]:
        """A measurement of *total* steps, *done* of which exist already."""
        bar = None
        if self.bars:
            bar = self.bars.add_task(
                escape(self._prefix + name), total=total, completed=done, note=""
            )
        yield Task(self, name, total, done, bar)
