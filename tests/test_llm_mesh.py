"""`LLM` from a real folder to a real mesh: weights cut over its devices, the tokens of one."""

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxattn import LLM, SamplingParams
from jaxattn.cli import main
from jaxattn.models.gemma3.config import from_hf
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.tokenizer import tokenizer_file
from jaxattn.sharding import DATA, HEADS
from tests.tiny_checkpoints import CONFIG_JSON, hf_tensors, random_weights, write_folder, write_gguf

JSON = CONFIG_JSON | {"num_hidden_layers": 1}
PROMPTS = ["the hen", "in there on a thin pan", "re re re"]
GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    weights = random_weights(from_hf(JSON))
    write_folder(path / "hf", hf_tensors(weights), config_json=JSON, shards=2)
    name, content = tokenizer_file(write_gguf(path / "a.gguf", {}))
    (path / "hf" / name).write_bytes(content)
    return path / "hf"


def tokens(path, **shares):
    llm = LLM(
        path,
        dtype="float32",
        max_model_len=32,
        max_num_seqs=2,
        max_num_batched_tokens=2,
        progress=False,
        **shares,
    )
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(("quantize", "data"), [(None, 2), ("int8", 1)])
def test_tensor_and_data_parallel_give_the_tokens_of_one_device(
    folder, tmp_path, monkeypatch, quantize, data
):
    if quantize is not None:
        path = tmp_path / "converted"
        assert main(["convert", str(folder), str(path), "--quantize", quantize]) == 0
        folder = path
    models = []
    monkeypatch.setattr(
        "jaxattn.engine.llm.Gemma3", lambda *args: models.append(Gemma3(*args)) or models[-1]
    )
    together, alone = tokens(folder, tensor_parallel=2, data_parallel=data), tokens(folder)
    assert len(set(together)) == len(PROMPTS)
    assert together == alone
    block = models[0].blocks[0]
    for weight, rows in ((block.mlp.gate.weight, 128), (block.attn.k.weight, 64)):
        array = weight[...]  # one kv head of 32 rows is stored twice
        assert array.dtype == (quantize or "float32")
        assert array.sharding.spec == PartitionSpec(HEADS, None)
        assert array.sharding.mesh.shape == {DATA: data, HEADS: 2}
        assert array.sharding.device_set == set(jax.devices()[: 2 * data])
        assert {each.data.shape for each in array.addressable_shards} == {(rows // 2, 64)}
