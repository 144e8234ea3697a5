"""Mistakes that somebody could make, one each, as edits of a statement: `planted.py` has the simulation look for them.

An edit is found by its function's qualified name and by what the statement says, in whatever file they are and however they are formatted. Where
the code has changed, the table is what has to be mended: the mistake is still possible.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    function: str
    """Its qualified name: `Buffer.take`."""
    old: str
    """Statements or an expression that the function has exactly once. A body of `...` is any body."""
    new: str
    """What stands there instead; `...` is the body that was there."""


@dataclass(frozen=True)
class Planted:
    name: str
    contract: str
    """That it breaks."""
    mistake: str
    edits: tuple[Edit, ...]


def _one(name: str, function: str, contract: str, mistake: str, old: str, new: str, *more: Edit) -> Planted:
    return Planted(name, contract, mistake, (Edit(function, old, new), *more))


OF_BUFFER = (
    _one(
        "no_window", "Buffer._eligible", "C1", "any finished group may be taken, however far ahead of a slow one",
        "ticket < anchor + self._config.window", "ticket >= anchor",
    ),
    _one(
        "window_off_by_one", "Buffer._eligible", "C1", "the window is one place too wide",
        "ticket < anchor + self._config.window", "ticket <= anchor + self._config.window",
    ),
    _one(
        "anchor_at_ready", "Buffer._eligible", "C1", "the window is anchored at the oldest finished group, not at the oldest one",
        "min(*tickets, oldest)", "min(tickets)",
    ),
    _one(
        "slots_off_by_one", "Buffer._may_draw", "C1", "one ticket too many is out",
        "self.outstanding < config.slots", "self.outstanding <= config.slots",
    ),
    _one(
        "slot_free_when_trained", "Buffer.trained", "C1", "a slot is free when its group is trained, before the weights are live",
        "self._trained_not_live[ticket] = version", "",
    ),
    _one(
        "release_all", "Buffer.release", "C1", "a delivery gives back the slots of all that is trained, its own or not",
        "self._trained_not_live = {ticket: made for ticket, made in self._trained_not_live.items() if made > version}",
        "self._trained_not_live.clear()",
    ),
    _one(
        "release_nothing", "Buffer.release", "C6", "slots of trained groups are never given back",
        "self._trained_not_live = {ticket: made for ticket, made in self._trained_not_live.items() if made > version}",
        "",
    ),
    _one(
        "release_in_silence", "Buffer.release", "C6", "a slot is given back, and nobody who waits for one hears of it",
        "self._notify()", "",
    ),
    _one(
        "newest_first", "Buffer._eligible", "order", 'order = "stalest" takes the group admitted last',
        'min(tickets, default=None) if self._config.order == "stalest" else next(iter(tickets), None)',
        'max(tickets, default=None) if self._config.order == "stalest" else next(iter(tickets), None)',
    ),
    _one(
        "too_fresh_a_store", "Buffer._may_draw", "stored", "what is in flight is not counted where finished groups may wait",
        "len(self._ready) + len(self._in_flight)", "len(self._ready)",
    ),
    _one(
        "failed_is_dropped", "Buffer.end", "C2", "a failed group is counted as dropped",
        'self._dropped if outcome == "dropped" else self._failed', "self._dropped",
    ),
    _one(
        "failures_twice", "Buffer.end", "C2", "failures of a group that was ready and is then dropped count twice",
        'outcome == "dropped" and unfinished', 'outcome == "dropped"',
    ),
    _one(
        "one_prompt_more", "Buffer._may_draw", "C2", "a prompt more is drawn than the run needs",
        "self._wanted - self._trained - self._inside <= 0", "self._wanted - self._trained - self._inside < 0",
    ),
    _one(
        "taken_not_saved", "Buffer.state", "C7", "a checkpoint forgets groups that are taken for a batch that is not full",
        "(*self._taken.values(), *self._ready.values())", "tuple(self._ready.values())",
    ),
    _one(
        "failures_not_restored", "Buffer.restore", "C2", "a resumed run forgets the failures of single rollouts",
        "self._rollout_failures = Counter(counted.rollout_failures)", "",
    ),
)  # fmt: skip

OF_PIPELINE = (
    _one(
        "release_before_live", "Pipeline._deliver", "C1", "slots are given back before the swap, not after it",
        'async with parts.telemetry.waits.named("delivery", "the swap in the engine"):\n'
        "    ...",
        "parts.buffer.release(version)\n"
        'async with parts.telemetry.waits.named("delivery", "the swap in the engine"):\n'
        "    ...",
    ),
    _one(
        "step_one_behind", "Pipeline.redo", "C7", "the step of a resumed run is that of the batch, not of the weights it made",
        "step.version", "step.step",
    ),
    _one(
        "deliveries_overtake", "Pipeline._train", "C4", "a version is published before the one before it is live",
        'delivery and (not await self._leaving.unless(self._delivered(delivery, "the version before")))',
        'delivery and self.step < 0 and (not await self._leaving.unless(self._delivered(delivery, "the version before")))',
    ),
    _one(
        "last_step_not_awaited", "Pipeline._last_checkpoint", "C7", "the last checkpoint does not wait for the step that is under way",
        "self._under_way and (not self._under_way.done())", "False",
    ),
    _one(
        "no_last_checkpoint", "Pipeline._train", "C7", "a run that has finished writes no checkpoint",
        "self.step >= self._plan.steps", "self.step > self._plan.steps",
    ),
    _one(
        "judged_a_step_late", "Pipeline._judge", "C1", "a group's age is looked at as if it were trained one step earlier",
        "self.step", "self.step - 1",
    ),
    _one(
        "cancelled_too_soon", "Pipeline._cancel_stale", "C2", "groups are ended as overdue that are not",
        "version - staleness.max_lag", "version - staleness.max_lag + 1",
    ),
)  # fmt: skip

OF_ROLLING = (
    _one(
        "failed_called_dropped", "Rolling._judge", "C2", "a group that failed ends as dropped",
        '"failed"', '"dropped"',
    ),
    _one(
        "cancel_leaks", "Rolling._roll_group", "C2", "a group that is cancelled keeps its ticket",
        'self._parts.ledger.ended(rolled, "dropped", self._cancelled.pop(ticket))', "self._cancelled.pop(ticket)",
    ),
    _one(
        "not_begun_again", "Rolling.admit", "C7", "what was in flight at a kill is not begun again",
        "buffer.in_flight.items()", "()",
    ),
    _one(
        "admitted_in_a_swap", "Rolling.admit", "barrier", "a group that waited for a slot begins in the middle of a swap",
        "if not parts.interrupts.admits:\n"
        "    continue",
        "",
    ),
    _one(
        "cancels_what_is_scored", "Rolling.cancel_older_than", "C2", "what its engine has is looked at, not what it had: a group that is scored stays",
        "not task.done()", "self._parts.engine.unfinished(names)",
    ),
    _one(
        "kept_for_ever", "Rolling._roll_group", "memory", "what a group's requests sampled is kept when it has ended",
        "self._parts.groups.forget(ticket)", "",
    ),
)  # fmt: skip

OF_LEDGER = (
    _one(
        "counted_first", "Ledger._enter", "C7", "a transition is counted, and then written into the journal",
        "self._journal.write(record)\n"
        "if flush:\n"
        "    self._journal.flush()\n"
        "self._buffer.count(record)",
        "self._buffer.count(record)\n"
        "self._journal.write(record)\n"
        "if flush:\n"
        "    self._journal.flush()",
    ),
    _one(
        "step_not_flushed", "Ledger.trained", "C7", "a step is in the journal, and the journal not on the disk",
        "self._enter(record, flush=True)",
        "self._enter(record)",
    ),
    _one(
        "skipped_is_trained", "Buffer.count", "C2", "groups of a skipped step are counted as trained, in a run and when it goes on",
        "for ticket in record.tickets:\n"
        '    self.end(ticket, "dropped", report.skipped)',
        "self.trained(record.tickets, report.version)",
    ),
    _one(
        "live_not_told", "Ledger.live", "C3", "which weights were served is not in the journal",
        "self._enter(LiveRecord(self._clock(), update.version, update.fingerprint))",
        "self._buffer.release(update.version)",
    ),
    _one(
        "drawn_told_first", "Ledger.drawn", "C7", "a ticket is reported, and then written into the journal",
        "self._enter(DrawnRecord(self._clock(), ticket, prompt))\n"
        "self._record(TicketDrawn(self._clock(), ticket, prompt.id))",
        "self._record(TicketDrawn(self._clock(), ticket, prompt.id))\n"
        "self._enter(DrawnRecord(self._clock(), ticket, prompt))",
    ),
    _one(
        "gone_not_written", "Ledger.ended", "C7", "a group that ends is not written into the journal",
        "self._enter(GoneRecord(self._clock(), rolled.ticket, outcome, reason, failures=reasons, rewards=rewards))",
        "self._buffer.count(GoneRecord(self._clock(), rolled.ticket, outcome, reason, failures=reasons))",
    ),
    _one(
        "gone_without_failures", "Ledger.ended", "C2", "failures inside a dropped group are not counted",
        'rolled.failures if outcome == "dropped" else ()', "()",
    ),
    _one(
        "failures_forgotten", "Buffer.count", "C2", "a recovered group is dropped without its failures",
        "self.end(record.ticket, record.outcome, record.reason, record.failures)",
        "self.end(record.ticket, record.outcome, record.reason)",
    ),
)  # fmt: skip

OF_PARTIAL = (
    _one(
        "prefix_not_sent", "Interrupts._rest", "C5", "an interrupted request is asked for again from its first token on",
        "had.tokens", "()",
    ),
    _one(
        "span_not_moved", "joined", "C4", "versions of the second part begin at the first token",
        "span.start + count", "span.start",
    ),
    _one(
        "in_flight_lost", "TokenStore.captured", "C7", "a checkpoint has what is done, not what is under way",
        "[name for name in names if name in self.asked]", "[]",
    ),
    _one(
        "done_but_unheard", "TokenStore.captured", "C7", "a completion whose rollout has not had its turn is neither done nor under way",
        "(self._unheard(name) if self.asked[name].done() else None) or running.get(name)",
        "None if self.asked[name].done() else running.get(name)",
    ),
    _one(
        "unheard_is_young", "TokenStore.first_version", "C1", "such a completion is not looked at when old groups are cancelled",
        "versions += [done.spans[0].version for name in request_ids if (done := self._unheard(name)) and done.spans]", "",
    ),
    _one(
        "lost_with_the_error", "TokenStore.sampling", "C7", "what a request had sampled is lost when an error ends it",
        "self.kept |= {name: part.completion() for name, part in self.captured([request_id]).items()}", "",
    ),
    _one(
        "barrier_of_none", "Interrupts.group", "barrier", "a group that ends lets the swap in, whatever others run",
        "if not self._groups:\n"
        "    self._idle.set()",
        "self._idle.set()",
    ),
    _one(
        "swap_before_abort", "Interrupts._aborted", "abort_resume", "the weights are swapped before the requests are ended",
        "await self._engine.abort()\n"
        "load = await self._engine.load(update)",
        "load = await self._engine.load(update)\n"
        "await self._engine.abort()",
    ),
    _one(
        "oldest_is_running", "TokenStore.first_version", "C1", "of a group's tokens only those of requests under way are looked at",
        "versions = [kept.spans[0].version for name in request_ids if (kept := self.kept.get(name)) and kept.spans]",
        "versions = []",
    ),
)  # fmt: skip

OF_RECOVERY = (
    _one(
        "checkpoint_prefix_lost", "_of_checkpoint", "C7", "what a checkpoint holds of requests under way is not used",
        "before = saved.state.begun if saved.state else {}", "before: dict[str, Completion] = {}",
    ),
    _one(
        "tokens_twice", "_begun", "C5", "tokens of a request that had ended are attached once more",
        "del since[end.request_id]", "",
    ),
    _one(
        "passes_from_before", "_passes", "C5", "passes that are in the checkpoint are attached to it",
        "read_passes(saved.run_dir, saved.saved_step, saved.state.passes if saved.state else 0)",
        "read_passes(saved.run_dir, saved.saved_step)",
    ),
    _one(
        "tokens_of_old_tickets_only", "recover", "C7", "tokens are kept of tickets in the checkpoint, not of those drawn since",
        "steps = list(_apply(saved.records, curriculum, buffer))", "",
        Edit("recover", "return steps, outlived", "return list(_apply(saved.records, curriculum, buffer)), outlived"),
    ),
    _one(
        "passes_outlive", "_begun", "C5", "passes are used of tickets that a loss of power took out of the journal",
        "None if any((key.ticket >= saved.resume.next_ticket for key in keys)) else _Begun(found, notes)",
        "_Begun(found, notes)",
    ),
    _one(
        "recovered_slots_kept", "recover", "C6", "slots of steps in the journal are never given back",
        "buffer.release(saved.step)", "",
    ),
    _one(
        "task_stands_still", "_apply", "C7", "the task is not moved past the prompts that were drawn",
        "found, _ = curriculum.draw(record.ticket)", "found = record.prompt",
    ),
)  # fmt: skip

OF_CHECKPOINTS = (
    _one(
        "state_after_await", "Snapshots.capture", "C7", "the controller's state is taken when the checkpoint is written",
        "started, adapter = (self._telemetry.clock(), self._adapter)",
        "self._of = parts\n"
        "started, adapter = (self._telemetry.clock(), self._adapter)",
        Edit("Snapshots.write.write", "moment.state", "self._encoded(step, started, self._of)"),
    ),
    _one(
        "passes_begun_late", "Snapshots.capture", "C7", "the file of passes changes when the checkpoint is written, not when it is taken",
        "self._passes.begin(step)", "",
        Edit("Snapshots.write", "self._passes.prune(self._checkpoints.oldest_step)", "self._passes.begin(step)\n"
            "self._passes.prune(self._checkpoints.oldest_step)"),
    ),
    _one(
        "saved_though_it_failed", "Snapshots.write", "C7", "a checkpoint that could not be written counts as written",
        "self._telemetry.warn(failure, UNSAVED)",
        "self.saved_step = step\n"
        "self._telemetry.warn(failure, UNSAVED)",
    ),
    _one(
        "saved_again", "Saving.begin", "C7", "the checkpoint that a run goes on from is written anew",
        "step == self._parts.snapshots.saved_step", "False",
    ),
    _one(
        "two_at_once", "Saving.begin", "C7", "a checkpoint begins while another one is written",
        "await self.finish()", "",
    ),
    _one(
        "pruned_too_far", "Snapshots.write", "C7", "passes of an older checkpoint that is kept are removed",
        "self._checkpoints.oldest_step", "step",
    ),
    _one(
        "position_off_by_one", "Snapshots._encoded", "C7", "a checkpoint skips the first record behind it",
        "parts.journal.position", "parts.journal.position + 1",
    ),
    _one(
        "pass_number_off_by_one", "Snapshots._encoded", "C7", "a checkpoint skips the first pass behind it",
        "self._passes.number", "self._passes.number + 1",
    ),
    _one(
        "not_flushed_before", "Snapshots.capture", "C7", "a checkpoint is on the disk before the records that it counts",
        "parts.journal.flush()", "",
    ),
)  # fmt: skip

OF_JOURNAL = (
    _one(
        "flush_does_nothing", "Journal.flush", "C7", "the journal is never put on the disk",
        "self._file.check()\n"
        "if self._flushes:\n"
        "    self._file.flush()",
        "pass",
    ),
    _one(
        "numbers_begin_anew", "Journal.__init__", "C7", "a resumed run numbers its records from 0 on",
        "max(position, end)", "position",
    ),
    _one(
        "checksum_ignored", "_body", "C7", "a record that does not match its checksum is taken for good",
        "body if xxhash.xxh3_64_intdigest(body, seed=place.number) == expected else None", "body",
    ),
    _one(
        "first_record_skipped", "read_journal", "C7", "reading begins one record too late",
        "segments = from_record(segments_of(run_dir), start)",
        "start += start > 0\n"
        "segments = from_record(segments_of(run_dir), start)",
    ),
    _one(
        "cut_one_too_far", "cut_journal", "C7", "the journal is cut one record before the checkpoint",
        "_end_before(path, position)", "_end_before(path, position - 1)",
    ),
    _one(
        "cut_one_short", "cut_journal", "C7", "the journal is cut one record behind the checkpoint",
        "_end_before(path, position)", "_end_before(path, position + 1)",
    ),
    _one(
        "skipped_is_replayed", "_kind_and_key", "C8", "a skipped step is given as one that was trained",
        "_SKIPPED if report.skipped else _STEPPED", "_STEPPED",
    ),
    _one(
        "torn_is_damaged", "read_frames", "C7", "a record that a kill has torn is taken for a damaged one",
        "following < 0 and _is_torn(data, at, place)", "False",
    ),
    _one(
        "torn_end_stays", "AppendFile.__init__", "C7", "a torn last line is not cut: the next record is glued to it",
        "os.truncate(path, (whole or whole_lines)(path))", "pass",
    ),
    _one(
        "written_later", "AppendFile.__init__", "C7", "what is appended waits in a buffer of the process",
        'path.open("ab", buffering=0)', 'path.open("ab")',
    ),
)  # fmt: skip

ELSEWHERE = (
    _one(
        "slots_of_config", "StalenessConfig.slots", "C1", "slots do not pay for the window",
        "(self.max_lag + 1) * self.groups_per_step - (self.window - 1)", "(self.max_lag + 1) * self.groups_per_step",
    ),
    _one(
        "seal_last", "_remove", "C7", "a checkpoint that is removed loses its seal last",
        "if (checkpoint / FILES).exists():\n"
        "    (checkpoint / FILES).unlink()\n"
        "    sync_to_disk(checkpoint)",
        "for path in sorted(checkpoint.iterdir(), key=lambda path: path.name == FILES) if checkpoint.exists() else ():\n"
        "    path.unlink()",
    ),
    _one(
        "sealed_unflushed", "_seal", "C7", "a checkpoint is sealed before its files are on the disk",
        "for path in files:\n"
        "    sync_to_disk(path)",
        "",
    ),
    _one(
        "damage_unseen", "damage", "C7", "a checkpoint is used that does not match its checksums",
        "_checksum(file) != entry.xxh3", "False",
    ),
    _one(
        "failed_group_counts", "Tickets.end", "C2", "rollouts that failed in a failed group count as those of a group that went on",
        'first and fact.outcome != "failed"', "first",
    ),
)  # fmt: skip

NOT_ALL = Edit(
    "Fleet.load",
    "[member.reports[name] for member in rotation.serving]",
    "[member.reports[name] for member in rotation.serving if name in member.reports]",
)
"""Some who serve have not loaded it."""

OF_FLEET = (
    _one(
        "late_stays", "Fleet._until_loaded", "C1", "a member that is late with new weights stays, and the version counts as live",
        "self._rotation.expel(loading[task], self._late(update))", "return {}",
        NOT_ALL,
    ),
    _one(
        "first_suffices", "Fleet._until_loaded", "C1", "a version counts as live when the first member has it",
        "if waiting:\n"
        "    ...",
        "if not has_it:\n"
        "    ...",
        NOT_ALL,
    ),
    _one(
        "old_weights_enter", "Care._catch_up", "C1", "a member comes back with the weights that it had",
        "member.versions.get(name) != update.version", "not member.absences",
    ),
    _one(
        "moved_from_the_start", "Requests._until_over", "C5", "a request that moves begins anew",
        "pending.rest()", "pending.request",
    ),
    _one(
        "nobody_is_left", "Rotation.lose", "C6", "a fleet whose last member is lost says nothing",
        "self._if_nobody_is_left(error)", "",
    ),
)  # fmt: skip

OF_CHOOSER = (
    _one(
        "beliefs_not_saved", "Snapshots._encoded", "C8", "a checkpoint holds nothing of what the curriculum learned",
        "parts.curriculum.state()", "None",
    ),
    _one(
        "nothing_learned_again", "_apply", "C8", "a resumed run does not learn from the records after its checkpoint",
        "curriculum.count(record)", "",
    ),
    _one(
        "level_not_restored", "Chooser.restore", "C8", "a resumed run has forgotten how good the policy is",
        "self._beliefs, self._level, self._scale = (dict(state.ratings), state.level, state.scale)",
        "self._beliefs, self._scale = (dict(state.ratings), state.scale)",
    ),
    _one(
        "flights_not_restored", "Chooser.restore", "C8", "groups in flight in the checkpoint teach nothing when they end",
        "self._flying, self._next = (dict(state.flying), state.next_draw)", "self._next = state.next_draw",
    ),
    _one(
        "time_not_restored", "Chooser.restore", "C8", "beliefs of a resumed run age from its start on",
        "self._flying, self._next = (dict(state.flying), state.next_draw)", "self._flying = dict(state.flying)",
    ),
    _one(
        "chance_not_seeded", "Chooser._rank", "C8", "draws from what is known of a prompt depend on the process",
        'random.Random(f"curriculum/{ticket}/{key}")', "random.Random()",
    ),
    _one(
        "rollouts_of_larger_groups_lost", "recover.asked", "C7", "a resumed run looks for the tokens of groups of the usual size only",
        "plan.rollout.all_of(in_flight[key.ticket])", "plan.rollout.group_size",
    ),
    _one(
        "order_of_beliefs_lost", "Chooser.state", "C8", "a checkpoint forgets which prompt was not drawn for longest",
        "self._beliefs.items()", "sorted(self._beliefs.items())",
    ),
)  # fmt: skip

OF_SCORES = (
    _one(
        "scores_not_kept", "ScoreLog._append", "C7", "scores are recorded in memory alone",
        "self._file.write(line)", "",
    ),
    _one(
        "scores_not_read", "ScoreLog.open", "C7", "a resumed run reads the recorded scores and does not use them",
        "self._records[record.key] = self._earlier[record.key] = record", "self._records[record.key] = record",
    ),
    _one(
        "no_second_attempt", "Endpoint._attempts", "C2", "a service that failed once is not asked again",
        "bad.final or number > self._config.retries", "True",
    ),
)  # fmt: skip

BY_PART = {
    "curriculum": OF_CHOOSER,
    "scores": OF_SCORES,
    "buffer": OF_BUFFER,
    "pipeline": OF_PIPELINE,
    "rolling": OF_ROLLING,
    "ledger": OF_LEDGER,
    "partial": OF_PARTIAL,
    "recovery": OF_RECOVERY,
    "checkpoints": OF_CHECKPOINTS,
    "journal": OF_JOURNAL,
    "elsewhere": ELSEWHERE,
    "fleet": OF_FLEET,
}
PLANTED = tuple(planted for part in BY_PART.values() for planted in part)
