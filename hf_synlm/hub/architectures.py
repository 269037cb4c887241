# SPDX-License-Identifier: Apache-2.0
"""The architectures of the package, registered with the Auto classes of transformers by importing this module.

From then on, `AutoModelForCausalLM` and the like know them, and `save_pretrained` and `push_to_hub` write repositories
that load without the package.
"""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_synlm.core.configuration_base import SyntacticConfig
from hf_synlm.core.outputs import ParseOutput, SyntacticClassifierOutput, SyntacticLMOutput
from hf_synlm.hub.flatten import write_code
from hf_synlm.models.gpst.configuration_gpst import GPSTConfig
from hf_synlm.models.gpst.modeling_gpst import (
    GPSTForCausalLM,
    GPSTForSequenceClassification,
    GPSTModel,
    GPSTPreTrainedModel,
)
from hf_synlm.models.lstm.configuration_lstm import LSTMConfig
from hf_synlm.models.lstm.modeling_lstm import LSTMForCausalLM, LSTMModel, LSTMPreTrainedModel
from hf_synlm.models.on_lstm.configuration_on_lstm import ONLSTMConfig
from hf_synlm.models.on_lstm.modeling_on_lstm import (
    ONLSTMForCausalLM,
    ONLSTMForSequenceClassification,
    ONLSTMModel,
    ONLSTMPreTrainedModel,
)
from hf_synlm.models.ordered_memory.configuration_ordered_memory import OrderedMemoryConfig
from hf_synlm.models.ordered_memory.modeling_ordered_memory import (
    OrderedMemoryForCausalLM,
    OrderedMemoryForSequenceClassification,
    OrderedMemoryModel,
    OrderedMemoryPreTrainedModel,
)
from hf_synlm.models.palm.configuration_palm import PaLMConfig
from hf_synlm.models.palm.modeling_palm import (
    PaLMForCausalLM,
    PaLMForSequenceClassification,
    PaLMModel,
    PaLMPreTrainedModel,
)
from hf_synlm.models.pcfg.configuration_pcfg import PCFGConfig
from hf_synlm.models.pcfg.modeling_pcfg import PCFGForCausalLM, PCFGModel, PCFGPreTrainedModel
from hf_synlm.models.prpn.configuration_prpn import PRPNConfig
from hf_synlm.models.prpn.modeling_prpn import (
    PRPNForCausalLM,
    PRPNForSequenceClassification,
    PRPNModel,
    PRPNPreTrainedModel,
)
from hf_synlm.models.pushdown.configuration_pushdown import PushdownConfig
from hf_synlm.models.pushdown.modeling_pushdown import PushdownForCausalLM, PushdownModel, PushdownPreTrainedModel
from hf_synlm.models.rnng.configuration_rnng import RNNGConfig
from hf_synlm.models.rnng.modeling_rnng import (
    RNNGForCausalLM,
    RNNGForSequenceClassification,
    RNNGModel,
    RNNGPreTrainedModel,
)
from hf_synlm.models.span_parser.configuration_span_parser import SpanParserConfig
from hf_synlm.models.span_parser.modeling_span_parser import SpanParserForTokenClassification
from hf_synlm.models.tree_lm.configuration_tree_lm import TreeLMConfig
from hf_synlm.models.tree_lm.modeling_tree_lm import (
    TreeLMForCausalLM,
    TreeLMForSequenceClassification,
    TreeLMModel,
    TreeLMPreTrainedModel,
)
from hf_synlm.models.urnng.configuration_urnng import URNNGConfig
from hf_synlm.models.urnng.modeling_urnng import URNNGForCausalLM, URNNGModel, URNNGPreTrainedModel
from hf_synlm.search.outputs import SyntacticModelOutput

__all__ = [
    "GPSTConfig", "GPSTForCausalLM", "GPSTForSequenceClassification", "GPSTModel", "GPSTPreTrainedModel",
    "LSTMConfig", "LSTMForCausalLM", "LSTMModel", "LSTMPreTrainedModel",
    "ONLSTMConfig", "ONLSTMForCausalLM", "ONLSTMForSequenceClassification", "ONLSTMModel", "ONLSTMPreTrainedModel",
    "OrderedMemoryConfig", "OrderedMemoryForCausalLM", "OrderedMemoryForSequenceClassification", "OrderedMemoryModel",
    "OrderedMemoryPreTrainedModel",
    "PCFGConfig", "PCFGForCausalLM", "PCFGModel", "PCFGPreTrainedModel",
    "PRPNConfig", "PRPNForCausalLM", "PRPNForSequenceClassification", "PRPNModel", "PRPNPreTrainedModel",
    "PaLMConfig", "PaLMForCausalLM", "PaLMForSequenceClassification", "PaLMModel", "PaLMPreTrainedModel",
    "ParseOutput",
    "PushdownConfig", "PushdownForCausalLM", "PushdownModel", "PushdownPreTrainedModel",
    "RNNGConfig", "RNNGForCausalLM", "RNNGForSequenceClassification", "RNNGModel", "RNNGPreTrainedModel",
    "SpanParserConfig", "SpanParserForTokenClassification",
    "SyntacticClassifierOutput", "SyntacticLMOutput", "SyntacticModelOutput",
    "TreeLMConfig", "TreeLMForCausalLM", "TreeLMForSequenceClassification", "TreeLMModel", "TreeLMPreTrainedModel",
    "URNNGConfig", "URNNGForCausalLM", "URNNGModel", "URNNGPreTrainedModel",
]  # fmt: skip

AUTO_CLASSES: dict[str, Any] = {
    "Model": AutoModel,
    "ForCausalLM": AutoModelForCausalLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}

SyntacticConfig.write_code = write_code

for _config_class in [globals()[_name] for _name in __all__ if _name.endswith("Config")]:
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    for _kind in _config_class.model_classes:
        _model_class = globals()[_config_class.__name__.removesuffix("Config") + _kind]
        AUTO_CLASSES[_kind].register(_config_class, _model_class, exist_ok=True)
