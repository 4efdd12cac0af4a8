"""The planted leaks that the verifier must find: a literal table.

Each is a bug that somebody could write, in a few lines; its docstring says which.
"""

import types
from collections.abc import Mapping

from tests.specimens import leaks_in_attention as attention
from tests.specimens import leaks_in_mixers as mixers
from tests.specimens import leaks_in_tokens as of_tokens
from tests.specimens.specimen import BYTES, Specimen, lazy, tokens, vectors

LEAKS: Mapping[str, Specimen] = types.MappingProxyType(
    {
        # Masks and attention.
        "mask off by one": vectors(attention.mask_off_by_one),
        "mask transposed": vectors(attention.mask_transposed),
        "mask after the softmax": vectors(attention.mask_after_softmax),
        "mask multiplied": vectors(attention.mask_multiplied),
        "mask not on one head": vectors(attention.mask_not_on_one_head),
        "mask or padding": vectors(attention.mask_or_padding),
        "mask in the first layer only": vectors(attention.mask_in_first_layer_only),
        "mask in blocks of two": vectors(attention.mask_in_blocks_of_two),
        "mask of 32 positions": vectors(attention.mask_of_32_positions, length=40),
        "mask of rows or heads": vectors(attention.mask_of_rows_or_heads),
        "prefix mask left on": vectors(attention.prefix_mask_left_on),
        "penalty for a mask": vectors(attention.penalty_for_mask),
        "window with the wrong sign": vectors(attention.window_with_wrong_sign),
        "window to both sides": vectors(attention.window_to_both_sides),
        "ragged chunk unmasked": vectors(attention.ragged_chunk_unmasked),
        "path past 64 unmasked": vectors(attention.long_path_unmasked),
        "one row unmasked": vectors(attention.one_row_unmasked),
        "rows packed": vectors(attention.rows_packed),
        "softmax over queries": vectors(attention.softmax_over_queries),
        "scores standardised": vectors(attention.scores_standardised),
        "stabilised over the sequence": vectors(attention.stabilised_over_sequence),
        "-1e4 in float16": vectors(attention.additive_float16_mask),
        "empty row sees all": vectors(attention.empty_row_sees_all),
        "heads merged without moving": vectors(attention.heads_merged_without_moving),
        "cache read one late": vectors(attention.cache_read_one_late),
        # Everything beside attention.
        "norm over time": vectors(mixers.norm_over_time),
        "batch statistics": vectors(mixers.batch_statistics),
        "batch statistics per position": vectors(mixers.batch_statistics_per_position),
        "time statistics in training": vectors(mixers.time_statistics_in_training),
        "positions dropped in training": vectors(mixers.positions_dropped_in_training),
        "centred convolution": vectors(mixers.centred_convolution),
        "token shift reversed": vectors(mixers.token_shift_reversed),
        "token shift rolled": vectors(mixers.token_shift_rolled),
        "central differences": vectors(mixers.central_differences),
        "reshape for a transpose": vectors(mixers.projection_of_transpose),
        "token mixing transposed": vectors(mixers.token_mixing_transposed),
        "low rank over time": vectors(mixers.low_rank_over_time),
        "circular FFT filter": vectors(mixers.circular_filter),
        "summary of the own chunk": vectors(mixers.summary_of_own_chunk),
        "experts choose tokens": vectors(mixers.expert_choice),
        "expert capacity from behind": vectors(mixers.expert_capacity_from_behind),
        "recurrence from both sides": vectors(mixers.bidirectional),
        "sum from the end": vectors(mixers.sum_from_the_end),
        "sorted over time": vectors(mixers.sorted_over_time),
        "median of neighbours": vectors(mixers.median_of_three),
        "quantised by the maximum": vectors(mixers.quantised_by_maximum),
        "clipped by the norm": vectors(mixers.clipped_by_norm),
        "gate of the mean": vectors(mixers.gate_of_mean),
        "upsampled linearly": vectors(mixers.upsampled_linearly),
        "count of nonzeros": vectors(mixers.count_of_nonzeros),
        "padding from zeros": vectors(mixers.left_padding_from_zeros),
        "blank if not finite": vectors(mixers.blank_if_not_finite),
        # Tokens and trainers.
        "next token embedded": tokens(of_tokens.next_token_embedded),
        "probabilities over the sequence": tokens(
            of_tokens.probabilities_over_sequence
        ),
        "loss weight in the logits": tokens(of_tokens.loss_weight_in_logits),
        "repetition penalty": tokens(of_tokens.repetition_penalty),
        "ids renumbered": tokens(of_tokens.ids_renumbered),
        "positions from the end": tokens(of_tokens.positions_from_the_end),
        "successor anywhere": tokens(of_tokens.successor_anywhere),
        "seeded by content": tokens(of_tokens.seeded_by_content),
        "pairs merged": tokens(of_tokens.merged_pairs),
        "last byte ends all": tokens(of_tokens.last_byte_ends_all, vocab_size=BYTES),
        "previous row for token": tokens(of_tokens.previous_row_for_token),
        "shared prompt": tokens(of_tokens.shared_prompt),
        "labels not shifted": tokens(
            of_tokens.honest, trainer=of_tokens.labels_not_shifted
        ),
        "adapts before it scores": tokens(
            of_tokens.honest, trainer=of_tokens.adapts_before_it_scores
        ),
        # JAX and flax.
        "sine of the next": lazy("jax_specimens", "sine_of_next"),
        "flax convolution": lazy("jax_specimens", "flax_convolution"),
        "flax batch norm": lazy("jax_specimens", "flax_batch_norm"),
        # PyTorch.
        "PyTorch batch_first forgotten": lazy(
            "torch_specimens", "BatchFirstForgotten", needs="torch"
        ),
        "PyTorch bidirectional GRU": lazy(
            "torch_specimens", "Bidirectional", needs="torch"
        ),
        "PyTorch mask inverted": lazy("torch_specimens", "MaskInverted", needs="torch"),
        "PyTorch BatchNorm1d": lazy("torch_specimens", "BatchNorm", needs="torch"),
        "PyTorch GroupNorm": lazy("torch_specimens", "GroupNorm", needs="torch"),
    }
)
