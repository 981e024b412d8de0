import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from keyhole.eval.tiny_language.tasks import make
from keyhole.eval.tiny_language.world import EOS, WORD_IDS
from recipes.tiny_model import trainer
from recipes.tiny_model.examination import batch_of_items
from recipes.tiny_model.export import export
from recipes.tiny_model.initial import initial_weights
from recipes.tiny_model.network import llama_config, supervised_logits
from recipes.tiny_model.optimizers import Optimizers, planned


def test_the_exported_folder_is_a_standard_model_with_the_same_logits(tmp_path):
    config = llama_config(num_layers=3, rope_theta=1e5)
    weights = {k: v.requires_grad_() for k, v in initial_weights(config, seed=0).items()}
    optimizers = Optimizers(weights)
    trainer.save_snapshot(
        tmp_path,
        weights,
        optimizers,
        step=0,
        tokens=0,
        seed=0,
        schedule=planned(1),
        rope_theta=1e5,
        curriculum="single",
        stretch=1,
    )
    out = tmp_path / "model"
    export(tmp_path, out)
    export(tmp_path, out)  # replaces the first
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]
    assert sum(path.stat().st_size for path in out.iterdir()) < 30e6

    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.generation_config.eos_token_id == WORD_IDS[EOS] == tokenizer.eos_token_id
    item = make("recall", 128, 0)
    batch = batch_of_items([item])
    ids = tokenizer(f"{item.prompt} {item.answer} {EOS}", return_tensors="pt").input_ids
    assert torch.equal(ids, batch.tokens)
    with torch.no_grad():
        expected = supervised_logits(weights, batch, config, torch.float32)
        found = model(ids).logits[0, batch.supervised]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
