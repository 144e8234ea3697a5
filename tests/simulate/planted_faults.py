"""Mistakes that somebody could make, one each, as exact edits of the source: `planted.py` has the simulation look for them.

An edit's `old` must occur exactly once. Where the code has moved, the table is what has to be mended: the mistake is still possible.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    name: str
    file: str
    """Below `headrace/`."""
    contract: str
    """That it breaks."""
    mistake: str
    edits: tuple[tuple[str, str], ...]
    """Old text, new text."""

    @property
    def module(self) -> str:
        return self.file.rsplit("/", 1)[-1].removesuffix(".py")


def _one(name: str, file: str, contract: str, mistake: str, old: str, new: str, *more: tuple[str, str]) -> Planted:
    return Planted(name, file, contract, mistake, ((old, new), *more))


LEDGER = "loop/ledger.py"
SAVING = "loop/saving.py"
PIPELINE, ROLLING = "loop/pipeline.py", "loop/rolling.py"
RECOVERY, SNAPSHOTS, CHECKPOINT = (
    "loop/recovery.py", "loop/snapshots.py", "loop/checkpoints.py",
)  # fmt: skip
CHOOSER = "loop/curriculum/chooser.py"
SCORE_LOG, ENDPOINT = "episodes/scoring/parts/score_log.py", "episodes/scoring/services/endpoint.py"
BUFFER, PARTIAL, STALENESS = "loop/buffer.py", "loop/partial.py", "loop/staleness.py"
FLEET, ROTATION, CARE = "engine/fleet/fleet.py", "engine/fleet/rotation.py", "engine/fleet/care.py"
REQUESTS = "engine/fleet/moving_requests.py"
JOURNAL, SEGMENTS, TICKETS, FILES = (
    "durable/journal.py",
    "durable/segments.py",
    "facts/numbers/tickets.py",
    "durable/atomic_files.py",
)

OF_BUFFER = (
    _one(
        "no_window", BUFFER, "C1", "any finished group may be taken, however far ahead of a slow one",
        "tickets = [ticket for ticket in tickets if ticket < anchor + self._config.window]",
        "tickets = [ticket for ticket in tickets if ticket >= anchor]",
    ),
    _one(
        "window_off_by_one", BUFFER, "C1", "the window is one place too wide",
        "ticket < anchor + self._config.window]", "ticket <= anchor + self._config.window]",
    ),
    _one(
        "anchor_at_ready", BUFFER, "C1", "the window is anchored at the oldest finished group, not at the oldest one",
        "anchor = min(*tickets, oldest)", "anchor = min(tickets)",
    ),
    _one(
        "slots_off_by_one", BUFFER, "C1", "one ticket too many is out",
        "self.outstanding < config.slots", "self.outstanding <= config.slots",
    ),
    _one(
        "slot_free_when_trained", BUFFER, "C1", "a slot is free when its group is trained, before the weights are live",
        "            self._trained_not_live[ticket] = version\n", "",
    ),
    _one(
        "release_all", BUFFER, "C1", "a delivery gives back the slots of all that is trained, its own or not",
        "self._trained_not_live = {ticket: made for ticket, made in self._trained_not_live.items() if made > version}",
        "self._trained_not_live.clear()",
    ),
    _one(
        "release_nothing", BUFFER, "C6", "slots of trained groups are never given back",
        "        self._trained_not_live = {ticket: made for ticket, made in self._trained_not_live.items() if made > version}\n", "",
    ),
    _one(
        "release_in_silence", BUFFER, "C6", "a slot is given back, and nobody who waits for one hears of it",
        "if made > version}\n        self._notify()", "if made > version}",
    ),
    _one(
        "newest_first", BUFFER, "order", 'order = "stalest" takes the group admitted last',
        'min(tickets, default=None) if self._config.order == "stalest"',
        'max(tickets, default=None) if self._config.order == "stalest"',
    ),
    _one(
        "too_fresh_a_store", BUFFER, "stored", "what is in flight is not counted where finished groups may wait",
        "len(self._ready) + len(self._in_flight) < config.stored", "len(self._ready) < config.stored",
    ),
    _one(
        "failed_is_dropped", BUFFER, "C2", "a failed group is counted as dropped",
        '(self._dropped if outcome == "dropped" else self._failed)[reason] += 1', "self._dropped[reason] += 1",
    ),
    _one(
        "failures_twice", BUFFER, "C2", "failures of a group that was ready and is then dropped count twice",
        'if outcome == "dropped" and unfinished:', 'if outcome == "dropped":',
    ),
    _one(
        "one_prompt_more", BUFFER, "C2", "a prompt more is drawn than the run needs",
        "self._wanted - self._trained - self._inside <= 0", "self._wanted - self._trained - self._inside < 0",
    ),
    _one(
        "taken_not_saved", BUFFER, "C7", "a checkpoint forgets groups that are taken for a batch that is not full",
        "groups = (*self._taken.values(), *self._ready.values())", "groups = tuple(self._ready.values())",
    ),
    _one(
        "failures_not_restored", BUFFER, "C2", "a resumed run forgets the failures of single rollouts",
        "        self._rollout_failures = Counter(counted.rollout_failures)\n", "",
    ),
)  # fmt: skip

OF_PIPELINE = (
    _one(
        "release_before_live", PIPELINE, "C1", "slots are given back before the swap, not after it",
        '        async with parts.telemetry.waits.named("delivery", "the swap in the engine"):',
        '        parts.buffer.release(version)\n'
        '        async with parts.telemetry.waits.named("delivery", "the swap in the engine"):',
    ),
    _one(
        "step_one_behind", PIPELINE, "C7", "the step of a resumed run is that of the batch, not of the weights it made",
        "self.step = step.version", "self.step = step.step",
    ),
    _one(
        "deliveries_overtake", PIPELINE, "C4", "a version is published before the one before it is live",
        "            if delivery and not await", "            if delivery and self.step < 0 and not await",
    ),
    _one(
        "last_step_not_awaited", PIPELINE, "C7", "the last checkpoint does not wait for the step that is under way",
        "if self._under_way and not self._under_way.done():", "if False:",
    ),
    _one(
        "no_last_checkpoint", PIPELINE, "C7", "a run that has finished writes no checkpoint",
        "        if self.step >= self._plan.steps:\n            await", "        if self.step > self._plan.steps:\n            await",
    ),
    _one(
        "judged_a_step_late", PIPELINE, "C1", "a group's age is looked at as if it were trained one step earlier",
        "judged = judge(group, self.step, self._plan.staleness)",
        "judged = judge(group, self.step - 1, self._plan.staleness)",
    ),
    _one(
        "cancelled_too_soon", PIPELINE, "C2", "groups are ended as overdue that are not",
        "cancel_older_than(version - staleness.max_lag,", "cancel_older_than(version - staleness.max_lag + 1,",
    ),
)  # fmt: skip

OF_ROLLING = (
    _one(
        "failed_called_dropped", ROLLING, "C2", "a group that failed ends as dropped",
        'ledger.ended(rolled, "failed", rolled.commonest_failure)',
        'ledger.ended(rolled, "dropped", rolled.commonest_failure)',
    ),
    _one(
        "cancel_leaks", ROLLING, "C2", "a group that is cancelled keeps its ticket",
        'self._parts.ledger.ended(rolled, "dropped", self._cancelled.pop(ticket))', "self._cancelled.pop(ticket)",
    ),
    _one(
        "not_begun_again", ROLLING, "C7", "what was in flight at a kill is not begun again",
        "for ticket, prompt in buffer.in_flight.items():", "for ticket, prompt in ():",
    ),
    _one(
        "admitted_in_a_swap", ROLLING, "barrier", "a group that waited for a slot begins in the middle of a swap",
        "            if not parts.interrupts.admits:\n                continue\n", "",
    ),
    _one(
        "cancels_what_is_scored", ROLLING, "C2", "what its engine has is looked at, not what it had: a group that is scored stays",
        "if first is not None and first < version and not task.done():",
        "if first is not None and first < version and self._parts.engine.unfinished(names):",
    ),
    _one(
        "kept_for_ever", ROLLING, "memory", "what a group's requests sampled is kept when it has ended",
        "        self._parts.groups.forget(ticket)\n", "",
    ),
)  # fmt: skip

OF_LEDGER = (
    _one(
        "counted_first", LEDGER, "C7", "a transition is counted, and then written into the journal",
        "        self._journal.write(record)\n        if flush:\n            self._journal.flush()\n        self._buffer.count(record)\n",
        "        self._buffer.count(record)\n        self._journal.write(record)\n        if flush:\n            self._journal.flush()\n",
    ),
    _one(
        "step_not_flushed", LEDGER, "C7", "a step is in the journal, and the journal not on the disk",
        "batch.steps), flush=True)", "batch.steps))",
    ),
    _one(
        "skipped_is_trained", BUFFER, "C2", "groups of a skipped step are counted as trained, in a run and when it goes on",
        "case SteppedRecord(report=report) if report.skipped:", "case SteppedRecord(report=report) if report.skipped and False:",
    ),
    _one(
        "live_not_told", LEDGER, "C3", "which weights were served is not in the journal",
        "self._enter(LiveRecord(self._clock(), update.version, update.fingerprint))", "self._buffer.release(update.version)",
    ),
    _one(
        "drawn_told_first", LEDGER, "C7", "a ticket is reported, and then written into the journal",
        "        self._enter(DrawnRecord(self._clock(), ticket, prompt))\n"
        "        self._record(TicketDrawn(self._clock(), ticket, prompt.id))\n",
        "        self._record(TicketDrawn(self._clock(), ticket, prompt.id))\n"
        "        self._enter(DrawnRecord(self._clock(), ticket, prompt))\n",
    ),
    _one(
        "gone_not_written", LEDGER, "C7", "a group that ends is not written into the journal",
        "self._enter(GoneRecord(self._clock(), rolled.ticket, outcome, reason, failures=reasons, rewards=rewards))",
        "self._buffer.count(GoneRecord(self._clock(), rolled.ticket, outcome, reason, failures=reasons))",
    ),
    _one(
        "gone_without_failures", LEDGER, "C2", "failures inside a dropped group are not counted",
        'failures = rolled.failures if outcome == "dropped" else ()', "failures = ()",
    ),
    _one(
        "failures_forgotten", BUFFER, "C2", "a recovered group is dropped without its failures",
        "record.outcome, record.reason, record.failures)", "record.outcome, record.reason)",
    ),
)  # fmt: skip

OF_PARTIAL = (
    _one(
        "prefix_not_sent", PARTIAL, "C5", "an interrupted request is asked for again from its first token on",
        "prefix=had.tokens, priority", "prefix=(), priority",
    ),
    _one(
        "span_not_moved", PARTIAL, "C4", "versions of the second part begin at the first token",
        "VersionSpan(span.start + count,", "VersionSpan(span.start,",
    ),
    _one(
        "in_flight_lost", PARTIAL, "C7", "a checkpoint has what is done, not what is under way",
        "            return self.kept | self._told(self.asked)\n", "            return dict(self.kept)\n",
    ),
    _one(
        "done_but_unheard", PARTIAL, "C7", "a completion whose rollout has not had its turn is neither done nor under way",
        "if unheard := self._unheard(name):", "if unheard := None:",
    ),
    _one(
        "unheard_is_young", PARTIAL, "C1", "such a completion is not looked at when old groups are cancelled",
        "        versions += [done.spans[0].version for one in request_ids if (done := self._unheard(one)) and done.spans]\n", "",
    ),
    _one(
        "lost_with_the_error", PARTIAL, "C7", "what a request had sampled is lost when an error ends it",
        "            self.kept |= self._told([request_id])\n", "",
    ),
    _one(
        "barrier_of_none", PARTIAL, "barrier", "a group that ends lets the swap in, whatever others run",
        "            if not self._groups:\n                self._idle.set()", "            self._idle.set()",
    ),
    _one(
        "swap_before_abort", PARTIAL, "abort_resume", "the weights are swapped before the requests are ended",
        "            await self._engine.abort()\n            load = await self._engine.load(update)\n",
        "            load = await self._engine.load(update)\n            await self._engine.abort()\n",
    ),
    _one(
        "oldest_is_running", PARTIAL, "C1", "of a group's tokens only those of requests under way are looked at",
        "versions = [kept.spans[0].version for one in request_ids if (kept := self.kept.get(one)) and kept.spans]\n"
        "        versions +=",
        "versions =",
    ),
)  # fmt: skip

OF_RECOVERY = (
    _one(
        "checkpoint_prefix_lost", RECOVERY, "C7", "what a checkpoint holds of requests under way is not used",
        "before = saved.state.begun if saved.state else {}", "before: dict[str, Completion] = {}",
    ),
    _one(
        "tokens_twice", RECOVERY, "C5", "tokens of a request that had ended are attached once more",
        "                del since[end.request_id]\n", "",
    ),
    _one(
        "passes_from_before", RECOVERY, "C5", "passes that are in the checkpoint are attached to it",
        "read_passes(saved.run_dir, saved.saved_step, saved.state.passes if saved.state else 0)",
        "read_passes(saved.run_dir, saved.saved_step)",
    ),
    _one(
        "tokens_of_old_tickets_only", RECOVERY, "C7", "tokens are kept of tickets in the checkpoint, not of those drawn since",
        "    steps = list(_apply(saved.records, curriculum, buffer))\n    buffer.release", "    buffer.release",
        (
            "    return steps, outlived\n",
            "    return list(_apply(saved.records, curriculum, buffer)), outlived\n",
        ),
    ),
    _one(
        "passes_outlive", RECOVERY, "C5", "passes are used of tickets that a loss of power took out of the journal",
        "return None if any(key.ticket >= saved.resume.next_ticket for key in keys) else _Begun(found, notes)",
        "return _Begun(found, notes)",
    ),
    _one(
        "recovered_slots_kept", RECOVERY, "C6", "slots of steps in the journal are never given back",
        "    buffer.release(saved.step)  # what was trained is live as soon as the run begins\n", "",
    ),
    _one(
        "task_stands_still", RECOVERY, "C7", "the task is not moved past the prompts that were drawn",
        "found, _ = curriculum.draw(record.ticket)", "found = record.prompt",
    ),
)  # fmt: skip

OF_SNAPSHOTS = (
    _one(
        "state_after_await", SNAPSHOTS, "C7", "the controller's state is taken when the checkpoint is written",
        "            (directory / CONTROLLER).write_bytes(moment.state)\n",
        "            (directory / CONTROLLER).write_bytes(msgspec.msgpack.encode(self._state(step, started, self._of)))\n",
        ("        started, adapter = ", "        self._of = parts\n        started, adapter = "),
    ),
    _one(
        "passes_begun_late", SNAPSHOTS, "C7", "the file of passes changes when the checkpoint is written, not when it is taken",
        "        self._passes.begin(step)\n", "",
        ("            self.saved_step = step\n            self._passes", "            self.saved_step = step\n            self._passes.begin(step)\n            self._passes"),
    ),
    _one(
        "saved_though_it_failed", SNAPSHOTS, "C7", "a checkpoint that could not be written counts as written",
        "            failure = str(error)\n", "            failure = str(error)\n            self.saved_step = step\n",
    ),
    _one(
        "saved_again", SAVING, "C7", "the checkpoint that a run goes on from is written anew",
        "if step == self._parts.snapshots.saved_step:", "if False:",
    ),
    _one(
        "two_at_once", SAVING, "C7", "a checkpoint begins while another one is written",
        "        await self.finish()\n        if (waited", "        if (waited",
    ),
    _one(
        "pruned_too_far", SNAPSHOTS, "C7", "passes of an older checkpoint that is kept are removed",
        "self._passes.prune(self._checkpoints.oldest_step)", "self._passes.prune(step)",
    ),
    _one(
        "position_off_by_one", SNAPSHOTS, "C7", "a checkpoint skips the first record behind it",
        "task.state()), parts.journal.position", "task.state()), parts.journal.position + 1",
    ),
    _one(
        "pass_number_off_by_one", SNAPSHOTS, "C7", "a checkpoint skips the first pass behind it",
        "=self._passes.number,", "=self._passes.number + 1,",
    ),
    _one(
        "not_flushed_before", SNAPSHOTS, "C7", "a checkpoint is on the disk before the records that it counts",
        "        parts.journal.flush()\n", "",
    ),
)  # fmt: skip

OF_JOURNAL = (
    _one(
        "flush_does_nothing", JOURNAL, "C7", "the journal is never put on the disk",
        "        self._file.check()\n        if self._flushes:\n            self._file.flush()", "        pass",
    ),
    _one(
        "numbers_begin_anew", JOURNAL, "C7", "a resumed run numbers its records from 0 on",
        "self.position = max(position, end)", "self.position = position",
    ),
    _one(
        "checksum_ignored", SEGMENTS, "C7", "a record that does not match its checksum is taken for good",
        "return body if xxhash.xxh3_64_intdigest(body, seed=place.number) == expected else None", "return body",
    ),
    _one(
        "first_record_skipped", JOURNAL, "C7", "reading begins one record too late",
        "    segments = from_record(segments_of(run_dir), start)\n", "    start += start > 0\n    segments = from_record(segments_of(run_dir), start)\n",
    ),
    _one(
        "cut_one_too_far", JOURNAL, "C7", "the journal is cut one record before the checkpoint",
        "else _end_before(path, position) for", "else _end_before(path, position - 1) for",
    ),
    _one(
        "cut_one_short", JOURNAL, "C7", "the journal is cut one record behind the checkpoint",
        "else _end_before(path, position) for", "else _end_before(path, position + 1) for",
    ),
    _one(
        "skipped_is_replayed", JOURNAL, "C8", "a skipped step is given as one that was trained",
        "return _SKIPPED if report.skipped else _STEPPED, report.step", "return _STEPPED, report.step",
    ),
    _one(
        "torn_is_damaged", SEGMENTS, "C7", "a record that a kill has torn is taken for a damaged one",
        "        if following < 0 and _is_torn(data, at, place):\n", "        if False:\n",
    ),
    _one(
        "torn_end_stays", FILES, "C7", "a torn last line is not cut: the next record is glued to it",
        "                os.truncate(path, (whole or whole_lines)(path))\n", "                pass\n",
    ),
    _one(
        "written_later", FILES, "C7", "what is appended waits in a buffer of the process",
        'path.open("ab", buffering=0)', 'path.open("ab")',
    ),
)  # fmt: skip

ELSEWHERE = (
    _one(
        "slots_of_config", STALENESS, "C1", "slots do not pay for the window",
        "* self.groups_per_step - (self.window - 1)", "* self.groups_per_step",
    ),
    _one(
        "seal_last", CHECKPOINT, "C7", "a checkpoint that is removed loses its seal last",
        "    if (checkpoint / FILES).exists():\n        (checkpoint / FILES).unlink()\n        sync_to_disk(checkpoint)\n",
        "    for path in sorted(checkpoint.iterdir(), key=lambda path: path.name == FILES) if checkpoint.exists() else ():\n"
        "        path.unlink()\n",
    ),
    _one(
        "sealed_unflushed", CHECKPOINT, "C7", "a checkpoint is sealed before its files are on the disk",
        "    for path in files:\n        sync_to_disk(path)\n", "",
    ),
    _one(
        "damage_unseen", CHECKPOINT, "C7", "a checkpoint is used that does not match its checksums",
        "if _checksum(file) != entry.xxh3:", "if False:",
    ),
    _one(
        "failed_group_counts", TICKETS, "C2", "rollouts that failed in a failed group count as those of a group that went on",
        'if first and fact.outcome != "failed":', "if first:",
    ),
)  # fmt: skip

NOT_ALL = (
    "[member.reports[name] for member in rotation.serving]",
    "[member.reports[name] for member in rotation.serving if name in member.reports]",
)
"""Some who serve have not loaded it."""

OF_FLEET = (
    _one(
        "late_stays", FLEET, "C1", "a member that is late with new weights stays, and the version counts as live",
        "                self._rotation.expel(loading[task], self._late(update))", "                return {}",
        NOT_ALL,
    ),
    _one(
        "first_suffices", FLEET, "C1", "a version counts as live when the first member has it",
        "        if waiting:  # in one wait", "        if not has_it:  # in one wait",
        NOT_ALL,
    ),
    _one(
        "old_weights_enter", CARE, "C1", "a member comes back with the weights that it had",
        "                if member.versions.get(name) != update.version:\n", "                if not member.absences:\n",
    ),
    _one(
        "moved_from_the_start", REQUESTS, "C5", "a request that moves begins anew",
        "member.engine.generate(pending.rest())", "member.engine.generate(pending.request)",
    ),
    _one(
        "nobody_is_left", ROTATION, "C6", "a fleet whose last member is lost says nothing",
        "        self._if_nobody_is_left(error)\n        self.notify()\n", "        self.notify()\n",
    ),
)  # fmt: skip

OF_CHOOSER = (
    _one(
        "beliefs_not_saved", SNAPSHOTS, "C8", "a checkpoint holds nothing of what the curriculum learned",
        "curriculum=parts.curriculum.state(),", "curriculum=None,",
    ),
    _one(
        "nothing_learned_again", RECOVERY, "C8", "a resumed run does not learn from the records after its checkpoint",
        "        curriculum.count(record)\n", "",
    ),
    _one(
        "level_not_restored", CHOOSER, "C8", "a resumed run has forgotten how good the policy is",
        "self._level, self._next, self._scale = state.level, state.next_draw, state.scale",
        "self._next, self._scale = state.next_draw, state.scale",
    ),
    _one(
        "flights_not_restored", CHOOSER, "C8", "groups in flight in the checkpoint teach nothing when they end",
        "self._beliefs, self._flying = dict(state.ratings), dict(state.flying)", "self._beliefs = dict(state.ratings)",
    ),
    _one(
        "time_not_restored", CHOOSER, "C8", "beliefs of a resumed run age from its start on",
        "self._level, self._next, self._scale = state.level, state.next_draw, state.scale",
        "self._level, self._scale = state.level, state.scale",
    ),
    _one(
        "chance_not_seeded", CHOOSER, "C8", "draws from what is known of a prompt depend on the process",
        'random.Random(f"curriculum/{ticket}/{key}")', "random.Random()",
    ),
    _one(
        "rollouts_of_larger_groups_lost", RECOVERY, "C7", "a resumed run looks for the tokens of groups of the usual size only",
        "plan.rollout.all_of(in_flight[key.ticket])", "plan.rollout.group_size",
    ),
    _one(
        "order_of_beliefs_lost", CHOOSER, "C8", "a checkpoint forgets which prompt was not drawn for longest",
        "ratings=tuple(self._beliefs.items()),", "ratings=tuple(sorted(self._beliefs.items())),",
    ),
)  # fmt: skip

OF_SCORES = (
    _one(
        "scores_not_kept", SCORE_LOG, "C7", "scores are recorded in memory alone",
        "        self._file.write(line)\n", "",
    ),
    _one(
        "scores_not_read", SCORE_LOG, "C7", "a resumed run reads the recorded scores and does not use them",
        "self._records[record.key] = self._earlier[record.key] = record", "self._records[record.key] = record",
    ),
    _one(
        "no_second_attempt", ENDPOINT, "C2", "a service that failed once is not asked again",
        "if bad.final or number > self._config.retries:", "if True:",
    ),
)  # fmt: skip

PLANTED = (
    *OF_CHOOSER,
    *OF_SCORES,
    *OF_BUFFER,
    *OF_PIPELINE,
    *OF_ROLLING,
    *OF_LEDGER,
    *OF_PARTIAL,
    *OF_RECOVERY,
    *OF_SNAPSHOTS,
    *OF_JOURNAL,
    *ELSEWHERE,
    *OF_FLEET,
)
