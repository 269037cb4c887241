# SPDX-License-Identifier: Apache-2.0
"""GPST's pretraining objective: its heads, its five parts, and the items over which each of them is a mean.

Shapes: B contexts, T tokens, S sentences, N chart cells, A slots of the node sequence (slot 0 the beginning, slot t + 1
node t), P boundaries, R rows, D hidden, d composition size, V vocabulary. Losses are in nats.

Source: Hu et al., ACL 2024, section 3.2; the authors' `model/generative_r2d2_fast.py`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_synlm.core.losses import linear_cross_entropy, share_of, widened
from hf_synlm.models.gpst.chart import ChartPlan, TreeNodes
from hf_synlm.models.gpst.configuration_gpst import GPSTConfig
from hf_synlm.models.gpst.tokens import ContextBatch
from hf_synlm.search.outputs import SyntacticModelOutput

LOSS_PARTS = ("auto_encoding", "height", "parser", "token", "action")


class NodeSequence(NamedTuple):
    """The nodes of the trees as inputs of the type layers.

    Fields:
        inputs: [B, A, D] with positions added.
        action_targets: [B, A] GEN or COMP of the node that follows the slot; GEN after the last node; -1 = padding.
        position_ids: [B, A] tokens generated so far.
        token_slots: [B, T + 1] rows of the flattened slots that predict token t.
        leaf_row: [leaves] context of each leaf.
        leaf_column: [leaves] position of each leaf.
    """

    inputs: Tensor
    action_targets: Tensor
    position_ids: Tensor
    token_slots: Tensor
    leaf_row: Tensor
    leaf_column: Tensor


class TreeStructure(NamedTuple):
    """`structure` of the output of `GPSTModel`: what heads and losses read.

    Fields:
        leaf_ids: [leaves] token ids.
        height_N: Expected height of the subtree of each cell.
    """

    text: ContextBatch
    plan: ChartPlan
    nodes: TreeNodes
    leaf_ids: Tensor
    height_N: Tensor
    sequence: NodeSequence


class GPSTHeads(nn.Module):
    """The heads of the pretraining objective, without the (tied) vocabulary matrix.

    action: LayerNorm, D -> D, gelu, -> 2 (GEN, COMP);
    token: D -> x D, gelu, -> D;  auto_encoding: d -> x d, gelu, -> D;  x = `config.head_expansion`.
    """

    def __init__(self, config: GPSTConfig):
        super().__init__()
        wide, narrow, dropout = config.hidden_size, config.composition_size, config.head_dropout
        self.action = nn.Sequential(
            nn.LayerNorm(wide, eps=1e-5), nn.Linear(wide, wide), nn.GELU(), nn.Dropout(dropout), nn.Linear(wide, 2)
        )
        self.token, self.auto_encoding = (
            nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, wide))
            for size, hidden in ((wide, config.head_expansion * wide), (narrow, config.head_expansion * narrow))
        )

    def objective(
        self,
        config: GPSTConfig,
        vocabulary_VD: Tensor,
        output: SyntacticModelOutput,
        labels: Tensor,
        loss_shares: Mapping[str, float] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The weighted sum of the five parts, the parts (detached), and log p(text, tree) [B] (detached).

        loss = w_ae L_ae + w_h L_h + w_p L_p + w_tok L_tok + w_act L_act, each a mean of its own: L_ae, L_tok over
        tokens, L_h over sentences, L_p over inner nodes, L_act over slots. `output` is that of the base model with
        outside vectors, `labels` [B, T] target ids in input positions (-100: left out of the token loss).

        Cost: two vocabulary rows per token, never all logits at once.
        Source: the authors' `GenerativeR2D2Fast.forward`; the two backward calls there are one here.
        """
        structure: TreeStructure = output.structure
        plan, leaf_ids = structure.plan, structure.leaf_ids
        row, column = structure.sequence.leaf_row, structure.sequence.leaf_column
        target = structure.text.align(labels.long())[row, column]
        counted = target != -100
        num_counted = counted.sum().clamp_min(1)
        tokens = self.token(output.token_hidden_state[row, column])
        states = torch.cat([self.auto_encoding(output.outside_vectors).to(tokens.dtype), tokens])
        share = {name: share_of(loss_shares, name) for name in LOSS_PARTS}
        weight = {name: share[name] * getattr(config, f"{name}_loss_weight") for name in LOSS_PARTS}
        coefficient = torch.cat(
            [
                torch.full_like(leaf_ids, weight["auto_encoding"] / plan.num_leaves, dtype=torch.float32),
                counted * (weight["token"] / num_counted),
            ]
        )
        targets = torch.cat([leaf_ids, torch.where(counted, target, leaf_ids)])
        vocabulary_loss, loss_R = linear_cross_entropy(states, vocabulary_VD, targets, coefficient)
        ae_loss, token_loss = loss_R[: plan.num_leaves], loss_R[plan.num_leaves :]
        action_loss, action_BA = self.action_loss(output)
        height = _height_loss(config, structure.height_N[plan.root_S], plan.length_S)
        parser = _parser_loss(output.parser_scores, structure)
        loss = vocabulary_loss + weight["height"] * height + weight["parser"] * parser + weight["action"] * action_loss
        losses = {
            "auto_encoding": ae_loss.mean(),
            "height": height.detach().float(),
            "parser": parser.detach(),
            "token": (token_loss * counted).sum() / num_counted,
            "action": action_loss.detach(),
        }
        losses = {name: share[name] * value for name, value in losses.items()}
        joint = -action_BA.sum(1).index_add(0, row, token_loss.to(action_BA.dtype))
        return loss, losses, joint

    def action_loss(self, output: SyntacticModelOutput) -> tuple[Tensor, Tensor]:
        """Mean cross entropy of all action slots, and -log p [B, A] of the tree's actions (0 after the last node)."""
        target = output.structure.sequence.action_targets
        log_prob = widened(self.action(output.type_hidden_state)).log_softmax(-1)
        loss_BA = -log_prob.gather(-1, target.clamp_min(0)[..., None]).squeeze(-1).masked_fill(target < 0, 0)
        # The slot after the last node is trained (GEN), but it is not an action of the tree.
        after_last = F.pad(target[:, 1:] < 0, (0, 1), value=True)
        return loss_BA.sum() / (target >= 0).sum(), loss_BA.detach().masked_fill(after_last, 0)


def count_items(text: ContextBatch, labels: Tensor) -> dict[str, int]:
    """Count the items of each of `LOSS_PARTS` from the text: a sentence of n tokens has n - 1 inner nodes.

    `labels` [B, T] are in input positions; -100 leaves a token out.
    """
    ids = text.sentence_ids
    is_token = ids != 0
    num_tokens = int(is_token.sum())
    num_sentences = int((is_token & (ids != F.pad(ids[:, :-1], (1, 0)))).sum())
    return {
        "auto_encoding": num_tokens,
        "height": num_sentences,
        "parser": num_tokens - num_sentences,
        "token": int((text.align(labels)[is_token] != -100).sum()),
        "action": 2 * num_tokens - num_sentences + len(ids),  # all nodes, and the slot after the last one of a row
    }


def _height_loss(config: GPSTConfig, height_S: Tensor, length_S: Tensor) -> Tensor:
    """Penalty of expected tree heights above a threshold; see `config.height_loss` for the variants."""
    threshold = config.height_threshold
    excess = (height_S - threshold).clamp_min(0)
    if config.height_loss == "paper":
        return (excess / length_S).mean()
    normalizer = torch.where(length_S > threshold, length_S - threshold, 1)
    if config.height_loss == "shipped":
        return excess.mean() * (1 / normalizer).mean()
    return (excess / normalizer).mean()


def _parser_loss(score_BP: Tensor, structure: TreeStructure) -> Tensor:
    """Mean over inner nodes (i, j) of the cross entropy of the scores of boundaries i + 1 .. j - 1 at the split.

    The scores of a node are a row as long as the longest sentence allows: the host knows that size, while the sum of
    the widths would have to come from the device. 0 if there is no inner node.
    """
    nodes, plan = structure.nodes, structure.plan
    num_inner = len(nodes.cell_A) - plan.num_leaves
    if not num_inner:
        return score_BP.sum() * 0
    inner = (nodes.cell_A < plan.num_leaves).to(torch.uint8).argsort(stable=True)[:num_inner]
    first = (nodes.context_A * score_BP.shape[1] + nodes.start_A)[inner, None]
    offset = torch.arange(plan.longest - 1, device=score_BP.device)
    flat = score_BP.flatten()
    outside = offset >= (nodes.end_A - nodes.start_A)[inner, None] - 1
    score = flat[(first + offset).clamp_max(len(flat) - 1)].masked_fill(outside, -torch.inf)
    split = nodes.split_A[inner] - nodes.start_A[inner] - 1
    return (score.logsumexp(1) - score.gather(1, split[:, None]).squeeze(1)).mean()
