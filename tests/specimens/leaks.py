"""The planted leaks that the verifier must find: a literal table.

Each is a bug that somebody could write, in a few lines; its docstring says which.
"""

import types
from collections.abc import Mapping

from tests.specimens import attention_leaks, mixers_leaks, parts, tokens_leaks

LEAKS: Mapping[str, parts.Specimen] = types.MappingProxyType(
    {
        # Masks and attention.
        "mask off by one": parts.vectors(attention_leaks.mask_off_by_one),
        "mask transposed": parts.vectors(attention_leaks.mask_transposed),
        "mask after the softmax": parts.vectors(attention_leaks.mask_after_softmax),
        "mask multiplied": parts.vectors(attention_leaks.mask_multiplied),
        "mask not on one head": parts.vectors(attention_leaks.mask_not_on_one_head),
        "mask or padding": parts.vectors(attention_leaks.mask_or_padding),
        "mask in the first layer only": parts.vectors(
            attention_leaks.mask_in_first_layer_only
        ),
        "mask in blocks of two": parts.vectors(attention_leaks.mask_in_blocks_of_two),
        "mask of 32 positions": parts.vectors(
            attention_leaks.mask_of_32_positions, length=40
        ),
        "mask of rows or heads": parts.vectors(attention_leaks.mask_of_rows_or_heads),
        "prefix mask left on": parts.vectors(attention_leaks.prefix_mask_left_on),
        "penalty for a mask": parts.vectors(attention_leaks.penalty_for_mask),
        "window with the wrong sign": parts.vectors(
            attention_leaks.window_with_wrong_sign
        ),
        "window to both sides": parts.vectors(attention_leaks.window_to_both_sides),
        "ragged chunk unmasked": parts.vectors(attention_leaks.ragged_chunk_unmasked),
        "path past 64 unmasked": parts.vectors(attention_leaks.long_path_unmasked),
        "one row unmasked": parts.vectors(attention_leaks.one_row_unmasked),
        "rows packed": parts.vectors(attention_leaks.rows_packed),
        "softmax over queries": parts.vectors(attention_leaks.softmax_over_queries),
        "scores standardised": parts.vectors(attention_leaks.scores_standardised),
        "stabilised over the sequence": parts.vectors(
            attention_leaks.stabilised_over_sequence
        ),
        "-1e4 in float16": parts.vectors(attention_leaks.additive_float16_mask),
        "empty row sees all": parts.vectors(attention_leaks.empty_row_sees_all),
        "heads merged without moving": parts.vectors(
            attention_leaks.heads_merged_without_moving
        ),
        "cache read one late": parts.vectors(attention_leaks.cache_read_one_late),
        # Everything beside attention.
        "norm over time": parts.vectors(mixers_leaks.norm_over_time),
        "batch statistics": parts.vectors(mixers_leaks.batch_statistics),
        "batch statistics per position": parts.vectors(
            mixers_leaks.batch_statistics_per_position
        ),
        "time statistics in training": parts.vectors(
            mixers_leaks.time_statistics_in_training
        ),
        "positions dropped in training": parts.vectors(
            mixers_leaks.positions_dropped_in_training
        ),
        "centred convolution": parts.vectors(mixers_leaks.centred_convolution),
        "token shift reversed": parts.vectors(mixers_leaks.token_shift_reversed),
        "token shift rolled": parts.vectors(mixers_leaks.token_shift_rolled),
        "central differences": parts.vectors(mixers_leaks.central_differences),
        "reshape for a transpose": parts.vectors(mixers_leaks.projection_of_transpose),
        "token mixing transposed": parts.vectors(mixers_leaks.token_mixing_transposed),
        "low rank over time": parts.vectors(mixers_leaks.low_rank_over_time),
        "circular FFT filter": parts.vectors(mixers_leaks.circular_filter),
        "summary of the own chunk": parts.vectors(mixers_leaks.summary_of_own_chunk),
        "experts choose tokens": parts.vectors(mixers_leaks.expert_choice),
        "expert capacity from behind": parts.vectors(
            mixers_leaks.expert_capacity_from_behind
        ),
        "recurrence from both sides": parts.vectors(mixers_leaks.bidirectional),
        "sum from the end": parts.vectors(mixers_leaks.sum_from_the_end),
        "sorted over time": parts.vectors(mixers_leaks.sorted_over_time),
        "median of neighbours": parts.vectors(mixers_leaks.median_of_three),
        "quantised by the maximum": parts.vectors(mixers_leaks.quantised_by_maximum),
        "clipped by the norm": parts.vectors(mixers_leaks.clipped_by_norm),
        "gate of the mean": parts.vectors(mixers_leaks.gate_of_mean),
        "upsampled linearly": parts.vectors(mixers_leaks.upsampled_linearly),
        "count of nonzeros": parts.vectors(mixers_leaks.count_of_nonzeros),
        "padding from zeros": parts.vectors(mixers_leaks.left_padding_from_zeros),
        "blank if not finite": parts.vectors(mixers_leaks.blank_if_not_finite),
        # Tokens and trainers.
        "next token embedded": parts.tokens(tokens_leaks.next_token_embedded),
        "probabilities over the sequence": parts.tokens(
            tokens_leaks.probabilities_over_sequence
        ),
        "loss weight in the logits": parts.tokens(tokens_leaks.loss_weight_in_logits),
        "repetition penalty": parts.tokens(tokens_leaks.repetition_penalty),
        "ids renumbered": parts.tokens(tokens_leaks.ids_renumbered),
        "positions from the end": parts.tokens(tokens_leaks.positions_from_the_end),
        "successor anywhere": parts.tokens(tokens_leaks.successor_anywhere),
        "seeded by content": parts.tokens(tokens_leaks.seeded_by_content),
        "pairs merged": parts.tokens(tokens_leaks.merged_pairs),
        "last byte ends all": parts.tokens(
            tokens_leaks.last_byte_ends_all, vocab_size=parts.BYTES
        ),
        "previous row for token": parts.tokens(tokens_leaks.previous_row_for_token),
        "shared prompt": parts.tokens(tokens_leaks.shared_prompt),
        "labels not shifted": parts.tokens(
            tokens_leaks.honest, trainer=tokens_leaks.labels_not_shifted
        ),
        "adapts before it scores": parts.tokens(
            tokens_leaks.honest, trainer=tokens_leaks.adapts_before_it_scores
        ),
        # JAX and flax.
        "sine of the next": parts.lazy("jax_specimens", "sine_of_next"),
        "flax convolution": parts.lazy("jax_specimens", "flax_convolution"),
        "flax batch norm": parts.lazy("jax_specimens", "flax_batch_norm"),
        # PyTorch.
        "PyTorch batch_first forgotten": parts.lazy(
            "torch_specimens", "BatchFirstForgotten", needs="torch"
        ),
        "PyTorch bidirectional GRU": parts.lazy(
            "torch_specimens", "Bidirectional", needs="torch"
        ),
        "PyTorch mask inverted": parts.lazy(
            "torch_specimens", "MaskInverted", needs="torch"
        ),
        "PyTorch BatchNorm1d": parts.lazy(
            "torch_specimens", "BatchNorm", needs="torch"
        ),
        "PyTorch GroupNorm": parts.lazy("torch_specimens", "GroupNorm", needs="torch"),
    }
)
