"""Adapters of PEFT on the Transformer layers of GPST: training, saving, loading, merging, search."""

from __future__ import annotations

import copy

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

from tests.test_modeling_gpst import NO_DROPOUT, ids_of, tiny


def test_lora_trains_saves_loads_and_merges(tmp_path):
    base = tiny(**NO_DROPOUT)
    ids, mask = ids_of(7, 4, 5)
    inputs = {"input_ids": ids, "attention_mask": mask}
    base.save_pretrained(tmp_path / "base")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    logits, base.name_or_path = base(**inputs).logits, str(tmp_path / "base")
    adapter = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn", "c_proj"], r=4, lora_alpha=8, fan_in_fan_out=True
    )
    model = get_peft_model(base, adapter)
    torch.testing.assert_close(model(**inputs).logits, logits)  # a new adapter changes nothing
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.02)
    losses = []
    for _ in range(4):
        loss = model(**inputs, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    tuned = model.eval()(**inputs).logits
    assert not torch.allclose(tuned, logits, atol=1e-3)
    model.save_pretrained(tmp_path / "adapter")
    for loaded in (
        PeftModel.from_pretrained(tiny(**NO_DROPOUT), tmp_path / "adapter"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", import_allowlist=["hf_synlm.modeling_gpst"]),
    ):
        torch.testing.assert_close(loaded.eval()(**inputs).logits, tuned)
    written = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    merged = copy.deepcopy(model).merge_and_unload()
    assert type(merged) is type(base) and set(merged.state_dict()) == set(before)
    torch.testing.assert_close(merged(**inputs).logits, tuned, atol=1e-4, rtol=1e-4)
    assert torch.equal(merged.generate(**inputs, max_new_tokens=3, do_sample=False), written)
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith(("c_attn.weight", "c_proj.weight"))}
