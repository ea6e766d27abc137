"""Breaks the code in one place at a time and sees whether the tests notice.

    python tests/mutations.py             all of them, a quarter of an hour long
    python tests/mutations.py trainer.py  those of one file

In a copy: each mutation replaces one piece of text, which stands there once, and then the named
tests must fail, having passed before. Ends with status 1 if one of them lives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    test: str  # FILE::NAME, below tests/


MUTATIONS = [
    Mutation(
        "a window's targets are its inputs",
        "char_dataset.py",
        "windows[:, 1:].contiguous()",
        "windows[:, :-1].contiguous()",
        "test_char_dataset.py::test_windows_are_stride_1_and_targets_are_one_character_later",
    ),
    Mutation(
        "the last window is left out",
        "char_dataset.py",
        "return len(self.data) - self.block_size",
        "return len(self.data) - self.block_size - 1",
        "test_char_dataset.py::test_windows_are_stride_1_and_targets_are_one_character_later",
    ),
    Mutation(
        "the held-out part begins with a character of the training part",
        "char_dataset.py",
        "self._part(cut, end)",
        "self._part(cut - 1, end)",
        "test_char_dataset.py::test_the_text_is_truncated_then_cut_once_before_windowing",
    ),
    Mutation(
        "what lies past the end is scored",
        "char_dataset.py",
        "positions >= end",
        "positions > end",
        "test_char_dataset.py::test_evaluation_windows_score_every_held_out_character_but_the_first_once",
    ),
    Mutation(
        "the seed of the order is ignored",
        "char_dataset.py",
        "_mix(np.array([seed], dtype=np.uint64))",
        "_mix(np.array([0], dtype=np.uint64))",
        "test_char_dataset.py::test_epochs_and_seeds_are_ordered_differently_and_well_mixed",
    ),
    Mutation(
        "every epoch has the same order",
        "char_dataset.py",
        "^ np.uint64(epoch)",
        "^ np.uint64(0)",
        "test_char_dataset.py::test_epochs_and_seeds_are_ordered_differently_and_well_mixed",
    ),
    Mutation(
        "a value of the permutation is walked one round too few",
        "char_dataset.py",
        "outside = value >= sizes",
        "outside = value > sizes",
        "test_char_dataset.py::test_every_epoch_is_a_permutation_of_all_windows",
    ),
    Mutation(
        "the mask lets the next character be seen",
        "model.py",
        ".triu(1 + T - S)",
        ".triu(2 + T - S)",
        "test_model.py::test_no_logit_depends_on_a_later_character",
    ),
    Mutation(
        "the mask hides the character itself",
        "model.py",
        ".triu(1 + T - S)",
        ".triu(T - S)",
        "test_model.py::test_every_earlier_character_is_seen",
    ),
    Mutation(
        "an edited attention is not run, but the fused one",
        "engine/kernels/ops.py",
        "code_digest(attention) == STANDARD_ATTENTION",
        "True",
        "test_kernels.py::test_an_edited_model_computes_what_was_written",
    ),
    Mutation(
        "the C kernel lets the next character be seen",
        "engine/kernels/kernels.c",
        "for (long j = i + 1; j < ROWS; j++)",
        "for (long j = i + 2; j < ROWS; j++)",
        "test_kernels.py::test_attention_and_its_gradient_are_those_of_float64",
    ),
    Mutation(
        "the C kernel learns from targets that are left out",
        "engine/kernels/kernels.c",
        "target[i] < 0 ? 0 : *factor",
        "*factor",
        "test_kernels.py::test_cross_entropy_and_its_gradient_are_those_of_float64",
    ),
    Mutation(
        "a weight learns from the last rows of a batch alone",
        "engine/kernels/kernels.c",
        "dw + j * C + c, C, first > 0);",
        "dw + j * C + c, C, 0);",
        "test_kernels.py::test_a_linear_layer_in_bfloat16_and_its_gradients_are_those_of_float64",
    ),
    Mutation(
        "with a cache, positions begin at 0 again",
        "model.py",
        "rotary(past, past + T,",
        "rotary(0, T,",
        "test_model.py::test_cached_logits_are_uncached_logits",
    ),
    Mutation(
        "a context that begins again has one character more",
        "engine/generation.py",
        "[-seen:]",
        "[-seen - 1 :]",
        "test_model.py::test_a_full_context_slides_or_begins_again_with_its_last_half",
    ),
    Mutation(
        "a token shift brings the next character instead of the one before",
        "engine/kernels/ops.py",
        "torch.cat((last, x[:, :-1]), dim=1)",
        "torch.cat((x[:, 1:], last), dim=1)",
        "test_model.py::test_cached_logits_are_uncached_logits",
    ),
    Mutation(
        "the kernel of a token shift brings the next character instead of the one before",
        "engine/kernels/kernels.c",
        "i % T ? load(xi + c - C)",
        "i % T ? load(xi + c + C)",
        "test_model.py::test_no_logit_depends_on_a_later_character",
    ),
    Mutation(
        "training drops nothing",
        "engine/kernels/ops.py",
        "F.dropout(x, p) if training and p else x",
        "x",
        "test_model.py::test_training_drops_from_embedding_and_residual_stream_what_is_asked_for",
    ),
    Mutation(
        "a cache forgets what a token shift saw of the last character",
        "model.py",
        "last, cache.last = cache.last, x[:, -1:]",
        "last = cache.last",
        "test_model.py::test_cached_logits_are_uncached_logits",
    ),
    Mutation(
        "the projections onto the residual stream start as wide as the others",
        "model.py",
        'onto_residual_stream = name.endswith("c_proj.weight")',
        'onto_residual_stream = name.endswith("c_proj.bias")',
        "test_model.py::test_gpt2_starts_as_the_paper_says_and_knows_nothing",
    ),
    Mutation(
        "top_p leaves out the character that reaches it",
        "engine/generation.py",
        "probability.cumsum(dim=-1) - probability",
        "probability.cumsum(dim=-1)",
        "test_model.py::test_top_k_and_top_p_keep_only_the_likeliest",
    ),
    Mutation(
        "texts of another batch have the same draws",
        "engine/generation.py",
        "(seed, first_row + row)",
        "(seed, row)",
        "test_sample.py::test_a_text_does_not_depend_on_how_many_there_are_nor_on_its_length",
    ),
    Mutation(
        "norms decay",
        "engine/optim/optimizer.py",
        "if parameter.dim() < 2:",
        "if parameter.dim() < 1:",
        "test_optimizer.py::test_every_parameter_is_in_exactly_one_group",
    ),
    Mutation(
        "Muon without Nesterov's look ahead",
        "engine/optim/muon.py",
        "updates = gradients ",
        "updates = list(map(torch.clone, momenta)) ",
        "test_optimizer.py::test_muon_takes_the_steps_of_torchs_muon",
    ),
    Mutation(
        "each step reads the learning rate from the GPU",
        "engine/optim/schedule.py",
        'if "initial_lr" not in group:',
        'if float(group["lr"]) or "initial_lr" not in group:',
        "test_budget.py::test_a_step_on_a_gpu_stays_within_its_budget_and_reads_nothing_from_it",
    ),
    Mutation(
        "Muon reads the learning rate from the GPU, which no CUDA graph can capture",
        "engine/optim/muon.py",
        "[*(result.float() * scale)]",
        "[*result.float()], alpha=scale",
        "test_budget.py::test_a_step_on_a_gpu_stays_within_its_budget_and_reads_nothing_from_it",
    ),
    Mutation(
        "a normalized update keeps the sizes of its rows",
        "engine/optim/muon.py",
        "dim=2 if rows >= columns else 1",
        "dim=1 if rows >= columns else 2",
        "test_optimizer.py::test_a_normalized_update_has_rows_of_one_size_and_is_as_large_as_an_orthogonal_one",
    ),
    Mutation(
        "the warm-up begins at 0",
        "engine/optim/schedule.py",
        "(step + 1) / (warmup_steps + 1)",
        "step / (warmup_steps + 1)",
        "test_schedule.py::test_the_schedule_is_that_of_the_table",
    ),
    Mutation(
        "gradients are clipped while scaled",
        "trainer.py",
        "self.scaler.unscale_(self.optimizer)",
        "()",
        "test_trainer.py::test_float16_clips_the_true_gradients",
    ),
    Mutation(
        "accumulated gradients are added up, not averaged",
        "trainer.py",
        "self.scaler.scale(loss / accumulation)",
        "self.scaler.scale(loss)",
        "test_trainer.py::test_accumulation_equals_the_large_batch",
    ),
    Mutation(
        "gradients are never summed over processes",
        "trainer.py",
        "require_backward_grad_sync = i == accumulation - 1",
        "require_backward_grad_sync = False",
        "test_distributed.py::test_losses_do_not_depend_on_the_number_of_processes",
    ),
    Mutation(
        "all micro-batches weigh the same, however many windows they have",
        "trainer.py",
        "loss * self.plan.weight(rank, i)",
        "loss * 1.0",
        "test_distributed.py::test_losses_do_not_depend_on_the_number_of_processes",
    ),
    Mutation(
        "every rank trains on the share of the first",
        "engine/run/plan.py",
        "rank * self.accumulation + i",
        "0 * self.accumulation + i",
        "test_trainer.py::test_each_window_is_visited_once_an_epoch_in_the_same_order_at_any_world_size",
    ),
    Mutation(
        "all ranks draw the same dropout",
        "engine/parallel/distributed.py",
        'f"{seed} {step} {world.rank}".encode()',
        'f"{seed} {step}".encode()',
        "test_trainer.py::test_dropout_differs_by_step_and_rank_and_repeats_by_seed",
    ),
    Mutation(
        "the seed of dropout is ignored",
        "engine/parallel/distributed.py",
        'f"{seed} {step} {world.rank}".encode()',
        'f"{step} {world.rank}".encode()',
        "test_trainer.py::test_dropout_differs_by_step_and_rank_and_repeats_by_seed",
    ),
    Mutation(
        "a resumed run begins with the first batch again",
        "char_dataset.py",
        "for k in range(first, last):\n            yield",
        "for k in range(0, last):\n            yield",
        "test_trainer.py::test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit",
    ),
    Mutation(
        "threads that cut batches outlive the run",
        "char_dataset.py",
        "pool.shutdown(cancel_futures=True)",
        "pass",
        "test_trainer.py::test_threads_hand_on_errors_and_end_when_closed",
    ),
    Mutation(
        "the optimizer's state is not restored",
        "engine/snapshots/manager.py",
        'optimizer.load_state_dict({"state": state,',
        'optimizer.load_state_dict({"state": {},',
        "test_trainer.py::test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit",
    ),
    Mutation(
        "the scale of float16 gradients is not restored",
        "trainer.py",
        "self.scaler.load_state_dict(snapshot.scaler_state)",
        "snapshot.scaler_state",
        "test_trainer.py::test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit",
    ),
    Mutation(
        "dropout is on while evaluating",
        "engine/run/evaluation.py",
        "model.eval()",
        "model.train()",
        "test_trainer.py::test_evaluation_scores_the_held_out_part_whatever_the_batch",
    ),
    Mutation(
        "the held-out loss is the mean of the ranks' means",
        "engine/run/evaluation.py",
        "return sum(loss for loss, _ in results) / characters",
        "return sum(x or 0 for x in rank_losses) / sum(x is not None for x in rank_losses)",
        "test_distributed.py::test_losses_do_not_depend_on_the_number_of_processes",
    ),
    Mutation(
        "every evaluation is the best",
        "trainer.py",
        "return best is None or loss < best[0]",
        "return True",
        "test_trainer.py::test_the_best_snapshot_is_that_of_the_lowest_held_out_loss",
    ),
    Mutation(
        "the end is not saved",
        "trainer.py",
        "self.requests.save or self._is_over() or self.plan",
        "self.requests.save or self.plan",
        "test_trainer.py::test_epochs_save_and_the_end_always_does",
    ),
    Mutation(
        "a snapshot is taken of numbers that are not finite",
        "trainer.py",
        "        self.divergence.check(self.step)\n        if not sharding",
        "        if not sharding",
        "test_trainer.py::test_numbers_that_are_not_finite_stop_the_run_and_spare_the_snapshot",
    ),
    Mutation(
        "every rank writes",
        "engine/parallel/distributed.py",
        "_attempt(action) if world.is_first else (None, None)",
        "_attempt(action)",
        "test_distributed.py::test_rank_0_alone_prints_and_writes",
    ),
    Mutation(
        "queries and keys are rotated and normalized apart on a GPU",
        "engine/kernels/ops.py",
        "q, k = rms_norm(rotate(qkv[:, :, :2], cos, sin)).unbind(2)",
        "q, k = (rms_norm(rotate(x, cos[:, 0], sin[:, 0])) for x in (q, k))",
        "test_budget.py::test_a_step_on_a_gpu_stays_within_its_budget_and_reads_nothing_from_it",
    ),
    Mutation(
        "ranks are not asked whether their weights are the same",
        "engine/parallel/distributed.py",
        "if own != checksums[0]",
        "if own is None",
        "test_distributed.py::test_ranks_whose_weights_differ_are_named_when_a_snapshot_is_saved",
    ),
    Mutation(
        "processes that replace others read what those left in the store",
        "engine/parallel/rendezvous.py",
        "uuid.uuid4().hex",
        "str(rank)",
        "test_distributed.py::"
        "test_processes_that_replace_others_do_not_read_what_those_left_in_the_store",
    ),
    Mutation(
        "a fork of a process that has trained trains too",
        "engine/parallel/distributed.py",
        "_joined_in not in (None, os.getpid())",
        "False",
        "test_launch.py::test_a_fork_of_a_session_that_has_trained_is_refused_and_does_not_hang",
    ),
    Mutation(
        "every rank prints",
        "engine/run/console.py",
        "lambda record: launched_rank() == 0",
        "lambda record: True",
        "test_distributed.py::test_rank_0_alone_prints_and_writes",
    ),
    Mutation(
        "a damaged snapshot is taken for a good one",
        "engine/snapshots/snapshot.py",
        "if digest.encode() != content[-DIGEST_LENGTH:]:",
        "if not digest:",
        "test_snapshot.py::test_any_flipped_bit_is_found",
    ),
    Mutation(
        "a snapshot is written onto the old one",
        "engine/snapshots/storage.py",
        "self._copy(self.temporary, self.path)",
        "shutil.copyfile(self.temporary, self.path)",
        "test_snapshot_files.py::test_a_process_killed_after_any_call_of_a_save_leaves_a_good_snapshot",
    ),
    Mutation(
        "a leftover of a killed save is written into",
        "engine/snapshots/storage.py",
        "                self._remove(leftover)",
        "                pass",
        "test_snapshot_files.py::"
        "test_a_leftover_of_a_killed_save_does_not_spoil_the_file_it_is_a_hard_link_of",
    ),
    Mutation(
        "a best snapshot that was not written is recorded in the next one",
        "engine/snapshots/manager.py",
        "        self.failures += 1\n",
        "        self.failures, self.best = self.failures + 1, saving.best\n",
        "test_snapshot_files.py::test_failures_in_a_row_end_the_run_and_a_success_resets_them",
    ),
    Mutation(
        "lines past the snapshot stay in the metrics",
        "engine/run/metrics.py",
        "if position(line) <= (step, evaluated) and",
        "if",
        "test_metrics.py::test_lines_past_the_restored_step_are_dropped_and_seconds_continue",
    ),
    Mutation(
        "AdamW has torch's own betas",
        "engine/optim/optimizer.py",
        '"betas": betas, "fused"',
        '"fused"',
        "test_optimizer.py::test_every_group_has_what_the_configuration_says",
    ),
    Mutation(
        "only the first group of parameters follows the schedule",
        "engine/optim/schedule.py",
        "for group in optimizer.param_groups:",
        "for group in optimizer.param_groups[:1]:",
        "test_trainer.py::test_every_parameter_follows_the_schedule",
    ),
    Mutation(
        "the order of the windows does not depend on the seed",
        "trainer.py",
        "self.train_dataset, config.seed,",
        "self.train_dataset, 1337,",
        "test_trainer.py::test_another_seed_is_another_order",
    ),
    Mutation(
        "an evaluation computes in float32 whatever the precision",
        "trainer.py",
        "with auto.eagerly(self.choices), auto.autocast(self.choices):\n            return evaluate(",
        "with auto.eagerly(self.choices):\n            return evaluate(",
        "test_trainer.py::test_training_and_evaluation_compute_in_the_type_asked_for",
    ),
    Mutation(
        "a best snapshot may have no loss at all",
        "trainer.py",
        "if not math.isfinite(loss):",
        "if False:",
        "test_trainer.py::test_a_held_out_loss_that_is_not_finite_stops_the_run_and_spares_the_best",
    ),
    Mutation(
        "blocks computed again drop other numbers",
        "model.py",
        "use_reentrant=False)",
        "use_reentrant=False, preserve_rng_state=False)",
        "test_model.py::test_blocks_computed_again_drop_what_they_dropped_before",
    ),
    Mutation(
        "every pass over the text has the same order",
        "char_dataset.py",
        "within, sizes[number], keys[number],",
        "within, sizes[number], keys[0 * number],",
        "test_char_dataset.py::test_every_pass_shuffles_in_an_order_of_its_own",
    ),
    Mutation(
        "ids stay in the order of appearance",
        "engine/text/encoding.py",
        "vocabulary = np.sort(points)",
        "vocabulary = points",
        "test_text.py::test_a_text_is_encoded_alike_in_memory_and_in_the_cache",
    ),
    Mutation(
        "half a line stays in the metrics on a full disk",
        "engine/run/metrics.py",
        "os.ftruncate(self.file, size)",
        "pass",
        "test_metrics.py::test_half_a_line_does_not_stay_on_a_full_disk",
    ),
    Mutation(
        "an exported unknown token has the sum of all rows",
        "engine/interop/transformers.py",
        "tensor.mean(dim=0, keepdim=True)",
        "tensor.sum(dim=0, keepdim=True)",
        "test_export.py::test_the_unknown_token_is_never_the_likeliest_and_never_drawn",
    ),
    Mutation(
        "reused characters get the rows of other characters",
        "engine/interop/pretrained.py",
        "value[[rows[vocabulary[i]] for i in reused]]",
        "value[: len(reused)]",
        "test_init_from.py::test_shared_characters_keep_their_rows_and_new_ones_are_drawn_around_the_mean",
    ),
    Mutation(
        "other logits in Transformers are exported",
        "export.py",
        "if not off < 0.01:",
        "if off != off:",
        "test_export.py::test_a_model_whose_code_was_edited_is_not_exported_as_another",
    ),
    Mutation(
        "a loss above the reference band is on track",
        "engine/reports/reference.py",
        'return where == "above", (',
        'return where == "below", (',
        "test_report.py::test_a_run_is_judged_in_words",
    ),
    Mutation(
        "a run is compared as if only its last start had overrides",
        "engine/reports/history.py",
        "for start in self.starts for o",
        "for start in self.starts[-1:] for o",
        "test_report.py::test_a_resumed_run_records_its_start_and_continues_its_seconds",
    ),
    Mutation(
        "a run that has not finished counts in the mean over seeds",
        "engine/reports/history.py",
        "run.step >= run.total_steps or",
        "True or",
        "test_report.py::test_finished_runs_of_several_seeds_have_a_mean",
    ),
    Mutation(
        "a failed job of a sweep counts as finished",
        "engine/reports/sweep.py",
        '"finished" if done else "failed"',
        '"finished"',
        "test_sweep.py::test_a_failed_job_is_in_the_table_and_in_the_status_and_stops_no_other",
    ),
    Mutation(
        "what is given is chosen, too",
        "engine/sizing.py",
        "put(config, {key: value for key, value in values.items() if get(config, key) is None})",
        "put(config, values)",
        "test_sizing.py::test_what_is_given_stands_and_the_rest_is_chosen_around_it",
    ),
    Mutation(
        "evaluations take none of the time",
        "engine/sizing.py",
        "(left - number * each)",
        "left",
        "test_sizing.py::test_steps_and_evaluations_fit_into_the_time",
    ),
    Mutation(
        "a longer time does not train on",
        "engine/sizing.py",
        "(trainer.max_minutes or minutes) / minutes",
        "1",
        "test_sizing.py::test_a_run_that_resumes_keeps_its_choice_and_a_longer_time_trains_on",
    ),
    Mutation(
        "a micro-batch that fits on one rank is taken by all",
        "engine/run/memory.py",
        "if all(distributed.gather(",
        "if any(distributed.gather(",
        "test_distributed.py::test_ranks_agree_on_the_micro_batch_and_name_it_when_memory_runs_out",
    ),
    Mutation(
        "an update that ran out of memory is done again",
        "trainer.py",
        "self.world.size == 1 and not self.is_updating",
        "self.world.size == 1",
        "test_trainer.py::test_an_update_that_runs_out_of_memory_is_not_done_again",
    ),
    Mutation(
        "patience ends a run one evaluation late",
        "engine/run/evaluation.py",
        "self.since_best >= self.patience",
        "self.since_best > self.patience",
        "test_trainer.py::test_patience_ends_a_run_that_resumes_only_with_more_of_it",
    ),
    Mutation(
        "pretrained weights are not evaluated before the first step",
        "engine/run/evaluation.py",
        "return self.at_start",
        "return False",
        "test_init_from.py::test_pretrained_weights_that_training_only_worsens_are_the_best",
    ),
    Mutation(
        "items are shuffled differently at each start",
        "engine/text/encoding.py",
        "np.random.default_rng(0)",
        "np.random.default_rng()",
        "test_text.py::test_items_are_shuffled_whole_after_truncating_and_always_alike",
    ),
    Mutation(
        "the final part is held out, too",
        "char_dataset.py",
        "(self.config.train_split or 0.9)), self._final_start()",
        "(self.config.train_split or 0.9)), len(self.data)",
        "test_char_dataset.py::test_the_final_part_is_in_neither_part_of_the_split",
    ),
    Mutation(
        "a text ends after the stop string",
        "sample.py",
        "held = held[: -len(stop)]",
        "held = held[:]",
        "test_sample.py::test_a_text_ends_before_the_stop_string",
    ),
    Mutation(
        "a window scores again what the one before it scored",
        "sample.py",
        "is_new[0, : seen - 1] = False",
        "is_new[0, :0] = False",
        "test_sample.py::test_every_character_is_scored_once_in_its_window",
    ),
    Mutation(
        "an ensemble has the mean of the losses",
        "sample.py",
        "math.log(len(models)) - torch.stack(losses).neg().logsumexp(dim=0)",
        "torch.stack(losses).mean(dim=0)",
        "test_sample.py::test_an_ensemble_has_the_mean_of_the_probabilities",
    ),
]


def fails(copy: Path, test: str) -> bool | None:
    """Whether a test fails in `copy`; None if this machine skips it; SystemExit if it cannot be run."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, f"tests/{test}"],
        cwd=copy,
        env={**os.environ, "XDG_CACHE_HOME": str(copy / ".cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ended.returncode not in (0, 1):  # 1: of the tests that were run, one failed
        raise SystemExit(f"{test}: cannot be run:\n{ended.stdout}{ended.stderr}")
    if " passed" not in ended.stdout and ended.returncode == 0:
        return None
    return ended.returncode == 1


def main() -> None:
    chosen = [m for m in MUTATIONS if m.file in sys.argv[1:] or not sys.argv[1:]]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        hidden = shutil.ignore_patterns(".*", "runs", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=hidden)
        for test in dict.fromkeys(mutation.test for mutation in chosen):
            outcome = fails(copy, test)
            if outcome:
                raise SystemExit(f"{test} fails with nothing changed")
            if outcome is None:
                print(f"not tried: {test} is skipped on this machine", flush=True)
                chosen = [mutation for mutation in chosen if mutation.test != test]
        for mutation in chosen:
            path = copy / mutation.file
            whole = path.read_text()
            path.write_text(whole.replace(mutation.old, mutation.new))
            caught = fails(copy, mutation.test)
            path.write_text(whole)
            name = mutation.test.partition("::")[2]
            print(
                f"{'caught' if caught else 'LIVES '}  {mutation.file}: {mutation.what} ({name})",
                flush=True,
            )
            if not caught:
                alive.append(mutation)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} caught")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
