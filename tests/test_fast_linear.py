"""`fast_linear`: served layers follow whatever is done to them, and are given back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import accelerate
import peft
import pytest
import torch
from tiny import DEVICE, prompt, tiny_model
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hf_offload import disable, enable, enabled, fast_linear
from hf_offload.cpu.kernels.linear import MOST_ROWS, faster_than_torch
from hf_offload.fast_linear import FastLinear, _Products

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="for layers on the CPU"),
    pytest.mark.skipif(not faster_than_torch(torch.float32, 1, 64), reason="needs AVX2"),
]


class Counted:
    """How many products the kernel has made."""

    products = 0

    def by(self, call: Any) -> int:
        before = self.products
        call()
        return self.products - before


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted, multiply = Counted(), _Products.multiply

    def count(*arguments: Any) -> None:
        counted.products += 1
        multiply(*arguments)

    monkeypatch.setattr(_Products, "multiply", count)
    return counted


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    torch.manual_seed(0)
    made = nn.Linear(48, 40).eval()
    with torch.no_grad(), fast_linear(made):
        yield made


X = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(1))


def stock(layer: nn.Linear, x: torch.Tensor = X) -> torch.Tensor:
    return nn.functional.linear(x, layer.weight, layer.bias)


def assert_follows(layer: nn.Linear, kernel: Counted, products: int = 1, x: torch.Tensor = X) -> None:
    """The layer multiplies with the weights that it has, by so many calls of the kernel."""
    before = kernel.products
    torch.testing.assert_close(layer(x), stock(layer, x), rtol=1e-5 if x.dtype == torch.float32 else 1e-2, atol=1e-5)
    assert kernel.products - before == products


def classes(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear)}


def test_layers_are_served_until_the_last_handle_is_closed() -> None:
    model = tiny_model("llama", "sdpa")
    before = [sorted(vars(module)) for module in model.modules()]
    first, second = fast_linear(model), fast_linear(model.model)
    assert first.layers == 4 * 7 + 1 == second.layers + 1
    first.close()
    first.close()
    assert first.layers == 0
    assert classes(model) == {FastLinear, nn.Linear}
    second.close()
    enable(model, "full")
    assert classes(model) == {FastLinear}
    with enabled(model, "window", budget=256, fast_linear=False):
        assert classes(model) == {nn.Linear}
    assert classes(model) == {FastLinear}
    enable(model, "full", fast_linear=False)
    assert classes(model) == {nn.Linear}
    enable(model, "full")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert classes(twin) == {FastLinear}
        disable(twin)
        assert classes(twin) == {nn.Linear}
    assert [sorted(vars(module)) for module in model.modules()] == before
    with pytest.raises(ValueError, match="unknown"):
        enable(model, "no such policy")
    assert classes(model) == {nn.Linear}
    handle = fast_linear(model)
    del model, twin
    gc.collect()
    assert handle.layers == 0


def test_what_has_no_layers_like_these_is_left_alone() -> None:
    class Scaled(nn.Linear):
        pass

    own = nn.Linear(4, 4)
    own.forward = lambda x: x  # type: ignore[method-assign]
    assert fast_linear(nn.ModuleList([Scaled(4, 4), own, nn.Bilinear(4, 4, 4)])).layers == 0
    assert type(own) is nn.Linear
    with pytest.raises(TypeError, match="not a str"):
        fast_linear("model")  # type: ignore[arg-type]


def test_weights_that_change_are_followed(layer: nn.Linear, kernel: Counted) -> None:
    assert_follows(layer, kernel)
    layer.weight.mul_(2)
    layer.bias.add_(1)
    assert_follows(layer, kernel)
    layer.weight = nn.Parameter(torch.randn(33, 48))
    layer.bias = None
    assert_follows(layer, kernel)
    layer.weight.data = torch.randn(35, 48)
    assert_follows(layer, kernel)
    layer.load_state_dict({"weight": torch.randn(35, 48)})
    assert_follows(layer, kernel)
    layer.to(torch.bfloat16)
    assert_follows(layer, kernel, x=X.bfloat16())
    layer.to(torch.float64)
    assert_follows(layer, kernel, 0, X.double())
    layer.float().weight.data = torch.randn(48, 48).T  # its columns are contiguous
    assert_follows(layer, kernel, 0)


def test_what_the_kernel_does_not_know_is_left_to_torch(layer: nn.Linear, kernel: Counted) -> None:
    assert_follows(layer, kernel)  # a product of this shape is laid out
    for bias in (torch.ones(1), torch.arange(80.0)[::2]):
        layer.bias = nn.Parameter(bias)
        assert_follows(layer, kernel, 0)
    layer.bias = nn.Parameter(torch.ones(7))
    with pytest.raises(RuntimeError, match="size"):
        layer(X)
    layer.bias = nn.Parameter(torch.randn(40))
    assert_follows(layer, kernel)
    prune.l1_unstructured(layer, "bias", 0.3)
    assert_follows(layer, kernel, 0)
    layer.weight = nn.Parameter(torch._neg_view(torch.randn(40, 48)), requires_grad=False)
    assert_follows(layer, kernel, 0)
    nn.utils.parametrizations.weight_norm(layer)
    layer.parametrizations.weight.original0.mul_(3)
    assert_follows(layer, kernel, 0)
    sparse = nn.Linear(48, 8, bias=False).eval()
    sparse.weight = nn.Parameter(torch.eye(8, 48).to_sparse_csr(), requires_grad=False)
    with fast_linear(sparse):
        assert kernel.by(lambda: torch.testing.assert_close(sparse(X[0]), X[0, :, :8])) == 0


def test_copies_are_served_with_weights_of_their_own(layer: nn.Linear, kernel: Counted) -> None:
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    layer.weight.zero_()
    for one in copies:
        assert_follows(one, kernel)
        assert one(X).abs().max() > 1


def test_offloaded_weights_are_multiplied(kernel: Counted) -> None:
    model, ids = tiny_model("llama", "sdpa"), prompt(1, 5)[0]
    with torch.no_grad():
        want = model(ids).logits
        with fast_linear(model):
            accelerate.cpu_offload(model, execution_device="cpu", offload_buffers=True)
            assert model.lm_head.weight.is_meta
            assert kernel.by(lambda: torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)) > 0
        assert kernel.by(lambda: model(ids)) == 0  # the hooks still hold the served forward
    assert fast_linear(model).layers == 0


def test_adapters_are_merged(kernel: Counted) -> None:
    model, ids = tiny_model("llama", "sdpa"), prompt(1, 6)[0]
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        want = adapted(ids).logits
        with fast_linear(adapted):
            for _ in range(2):
                assert (
                    kernel.by(lambda: torch.testing.assert_close(adapted(ids).logits, want, rtol=1e-4, atol=1e-4)) > 0
                )
                adapted.merge_adapter()
        torch.testing.assert_close(adapted.unload()(ids).logits, adapted.get_base_model()(ids).logits)


def test_inputs_of_every_form(layer: nn.Linear, kernel: Counted) -> None:
    for x in (X[0, 0], X[:, 0], X[0, 0].expand(2, 2, 48), X.transpose(0, 1), torch.randn(48, 5).T):
        assert_follows(layer, kernel, x=x)
    many = torch.randn(MOST_ROWS + 1, 48)
    for x in (many, many[:0]):
        assert_follows(layer, kernel, 0, x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(2, 47))
    with pytest.raises(RuntimeError, match="dtype"):
        layer(X.bfloat16())


def test_torch_sees_what_it_traces_transforms_or_intercepts(layer: nn.Linear, kernel: Counted) -> None:
    want = stock(layer)

    class Twice(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            return 2 * found if function is nn.functional.linear else found

    assert torch.equal(torch.func.vmap(layer)(X), want)
    with torch.enable_grad():
        assert layer(X).requires_grad
    tangent = torch.func.jvp(layer, (X,), (X,))[1]
    torch.testing.assert_close(tangent, want - layer.bias, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.jit.trace(layer, X, check_trace=False)(2 * X), stock(layer, 2 * X))
    with FlopCounterMode(display=False) as counter:
        layer(X)
    assert counter.get_total_flops() == 2 * 6 * 48 * 40
    with Twice():
        assert torch.equal(layer(X), 2 * want)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(X).dtype == torch.bfloat16
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(X), want)
    assert torch.equal(torch.export.export(layer, (X,)).module()(X), want)
    assert kernel.products == 0
    with torch.device("cpu"):  # a function mode, too
        assert kernel.by(lambda: layer(X)) == 1


def test_two_threads_at_once(layer: nn.Linear) -> None:
    other = nn.Linear(48, 40).eval()

    def work(mine: nn.Linear, seed: int) -> None:
        x = torch.randn(1, 48, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            want = stock(mine, x)
            for _ in range(300):
                torch.testing.assert_close(mine(x), want, rtol=1e-5, atol=1e-5)

    with fast_linear(other), ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (layer, other, layer), range(3)))
