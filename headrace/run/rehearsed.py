"""The result of a rehearsal: complaints, remarks, and the settings with all values chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.reports import Finding, Sight
from headrace.episodes.tasks.demonstrations import Demonstrations
from headrace.facts.facts import FilesChecked, Warned
from headrace.run.build import LoadedFiles
from headrace.run.config import RunConfig
from headrace.run.rehearsal.words import Lines, page
from headrace.run.teaching import PlannedTeacher
from headrace.views.screen.start_line import StartSteps

ORDER = (
    "Run",
    "Warm start",
    "Demonstrations",
    "Prompts",
    "Teachers",
    "Environment",
    "Reward",
    "Evaluation sets",
    "Algorithm",
    "Where",
    "Memory",
)


@dataclass(kw_only=True)
class Rehearsal:
    """The result of a rehearsal."""

    config: RunConfig
    """The config, with chosen values for settings that it left open."""
    sections: dict[str, Lines] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Remarks on settings that work, but perhaps not as intended."""
    keys: dict[str, str] = field(default_factory=dict)
    """Keys of those notes that the run may withdraw."""
    problems: list[str] = field(default_factory=list)
    resumes: bool = False
    planned_teachers: list[PlannedTeacher] = field(default_factory=list)
    """The teachers whose models were found."""
    findings: list[Finding] = field(default_factory=list)
    """The preflight of the model's files."""
    sight: Sight | None = None
    """One row, as the model and as the reward see it."""
    prompt_tokens: int = 0
    """Length of a usual prompt."""
    steps: StartSteps = field(default_factory=StartSteps)
    """The work of the moment."""
    tried: dict[str, LoadedFiles] = field(default_factory=dict)
    """The parts that were loaded for each run, by the names of adapters; the name is empty if there is one run."""
    demonstrations: Demonstrations | None = None
    """The rows of the warm start, if the run begins with one."""
    served: str = ""
    """The way in which the native engine serves the model, and its speed; empty if that was not asked."""
    unmeasured: str = ""
    """The reason why nothing could be measured; empty if it was."""

    def page(self) -> str:
        """The result as text, 80 columns wide."""
        return page(
            dict(sorted(self.sections.items(), key=lambda item: ORDER.index(item[0].split(",")[0]))), self.notes
        )

    def facts(self, t: float) -> list[FilesChecked | Warned]:
        """The facts with which a run begins. `t`: now, in the run's seconds."""
        checked = [FilesChecked(t, tuple(self.findings), self.sight)] if self.findings else []
        return [*checked, *(Warned(t, note, self.keys.get(note, "")) for note in self.notes)]

    @contextmanager
    def part(self) -> Iterator[None]:
        """Collects a ConfigError of this part, so that the next part is checked too."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(str(error))

    def doubt(self, problem: str, certain: bool) -> None:
        """Refuses what is certain to fail. In a resumed run it only notes the problem, because the run has worked before."""
        if certain and not self.resumes:
            raise ConfigError(problem)
        self.notes.append(problem)

    def agree(self, findings: Sequence[Finding], model_dir: Path) -> None:
        """Takes what the preflight of a model found: contradictions are refused, remarks noted."""
        self.findings = [*findings]
        for finding in findings:
            with self.part():
                if finding.verdict == "refused":
                    self.doubt(f"{model_dir}: {finding.text}", certain=True)
            if finding.verdict == "remark" and finding.text not in self.notes:
                self.notes.append(finding.text)
