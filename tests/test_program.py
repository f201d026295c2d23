"""The engine's step lowers for TPUs that are not here, on every way to share eight of them."""

from dataclasses import replace

import jax
import pytest

from jaxattn import Target
from jaxattn.engine.devices import make_mesh
from jaxattn.engine.engine import plan_engine, table_widths
from jaxattn.engine.program import Program
from jaxattn.models.gemma3.config import CONFIGS
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.sharding import abstract_weights, shared_config
from tests import tiny_model, vision_models

# One layer of 4B, with few words.
_4B = CONFIGS["gemma-3-4b"]
CONFIG = replace(_4B, layers=_4B.layers[:1], vocab_size=512, vision=None)
LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


@pytest.mark.parametrize(
    ("tensor", "data"),
    [(1, 8), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 4), (8, 1)))],
)
def test_the_kernels_are_in_the_step(tensor, data):
    """Kernels are cut by `shard_map` alone: JAX refuses one that is not, also on one device."""
    target = Target.tpu("v5e")
    options = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "page_size": 8, **LIMITS}
    plan, num_pages = plan_engine(CONFIG, tensor_parallel=tensor, target=target, **options)
    config = shared_config(CONFIG, tensor)
    mesh = make_mesh(tensor_parallel=tensor, data_parallel=data)
    program = Program(
        Gemma3(config, abstract_weights(config, "bfloat16", mesh)),
        plan,
        num_pages=num_pages,
        widths=table_widths(plan, 64, 16),
        max_num_seqs=4,
        backend="pallas_tpu",
        mesh=mesh,
        target=target,
    )
    with jax.set_mesh(mesh):
        exported = jax.export.export(program.step, platforms=["tpu"])(
            *program.arguments(4), num_tokens=4
        )
    assert exported.mlir_module().count("tpu_custom_call") > 0
    assert exported.nr_devices == tensor * data


def kinds(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_the_shapes_are_those_that_the_engine_passes():
    runner = tiny_model.engine().runner
    assert kinds(runner.buffers) == kinds(runner.program.buffer_shapes())
    for size in runner.buckets:
        passed = runner._inputs(0, [], None, min(size, 4), None)
        assert kinds(passed) == kinds(runner.program.input_shapes(size))


def test_the_shapes_of_images_are_those_that_the_engine_passes(monkeypatch):
    engine = tiny_model.engine(
        vision_models.load("wide_window"), max_model_len=64, max_num_batched_tokens=32
    )
    runner, passed = engine.runner, {}
    encoder, step = runner._encoder, runner._step

    size = runner.buckets[-1]
    real = encoder.encode
    monkeypatch.setattr(
        encoder, "encode", lambda *given: passed.update(image=given) or real(*given)
    )
    monkeypatch.setattr(
        runner,
        "_step",
        lambda *given, **static: passed.update(step=given) or step(*given, **static),
    )
    runner.buckets = (size,)
    runner.precompile()
    assert kinds(passed["image"]) == kinds(encoder.arguments())
    _, _, inputs, asked, embeddings = runner.program.arguments(size, images=True)
    assert kinds(passed["step"][2:]) == kinds((inputs, asked, embeddings))
