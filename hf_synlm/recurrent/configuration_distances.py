# SPDX-License-Identifier: Apache-2.0
"""Base of the configurations of ON-LSTM and PRPN, whose syntactic distances gold trees may train."""

from hf_synlm.recurrent.configuration_recurrent import RecurrentConfig

SYNTACTIC_DISTANCE_SCOPES = ("sentence", "batch")
SYNTACTIC_DISTANCE_REDUCTIONS = ("mean", "sum")


class SyntacticDistanceConfig(RecurrentConfig):
    """Base of the configurations of models with syntactic distances, which gold trees may train (see `ranking_loss`).

    Fields:
        language_model_weight: weight of the language model's loss, regularization included.
        syntactic_distance_weight: weight of the ranking loss.
        syntactic_distance_margin: smallest difference of two distances without a loss.
        syntactic_distance_scope: pairs inside a "sentence" (the paper), or across the "batch" (the released code).
        syntactic_distance_reduction: "mean" or "sum" over the pairs.
        syntactic_distance_scale: factor of the distances before they are compared (those of ON-LSTM lie in [0, 1)).
    """

    parse_method = "distance"

    language_model_weight: float | int = 1.0
    syntactic_distance_weight: float | int = 0.75
    syntactic_distance_margin: float | int = 1.0
    syntactic_distance_scope: str = "sentence"
    syntactic_distance_reduction: str = "mean"
    syntactic_distance_scale: float | int = 1.0

    def check_supervision(self) -> None:
        """Raise ValueError for bad `syntactic_distance_*`."""
        self.check_finite("language_model_weight", "syntactic_distance_weight", "syntactic_distance_margin")
        self.check_finite("syntactic_distance_scale", positive=True)
        self.check_choices(
            syntactic_distance_scope=SYNTACTIC_DISTANCE_SCOPES,
            syntactic_distance_reduction=SYNTACTIC_DISTANCE_REDUCTIONS,
        )
