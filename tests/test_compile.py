"""`CompiledModel`: an untouched model, nothing kept, groups, and errors that say what to do."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn

import graphfuse
from graphfuse import FuseConfig
from graphfuse.errors import (
    BackendUnavailableError,
    ConfigError,
    FusionRequiredError,
    GradientsEnabledError,
    GraphBreakError,
    GroupError,
)
from graphfuse.testing import fake_tp, trace
from tests.conftest import Calls, H, Layer, Model, ids

# --- the model is left alone ----------------------------------------------------------------------------------------


def test_the_model_is_as_before(model):
    state, forward, modules = copy.deepcopy(model.state_dict()), Layer.__dict__["forward"], dict(model.named_modules())
    compiled = graphfuse.compile(model, example_inputs=ids(2, 3))
    compiled.close()
    assert Layer.__dict__["forward"] is forward
    assert dict(model.named_modules()) == modules
    assert model.training
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)


def test_the_model_is_as_before_when_tracing_fails():
    class Failing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            print(x)
            return super().forward(x)

    model = Model()
    model.layers = nn.ModuleList(Failing() for _ in range(2))
    forward = Failing.__dict__["forward"]
    with pytest.raises(GraphBreakError):
        graphfuse.compile(model.requires_grad_(False), example_inputs=ids(1, 2))
    assert Failing.__dict__["forward"] is forward


def test_threads_may_trace_models_of_one_class_at_once():
    forward, failures = Layer.__dict__["forward"], []

    def compile_one(seed: int) -> None:
        torch.manual_seed(seed)
        model = Model(2)
        try:
            torch.testing.assert_close(graphfuse.compile(model)(ids(2, 3)), model(ids(2, 3)))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=compile_one, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert Layer.__dict__["forward"] is forward


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_keeps_a_model_that_was_dropped(closed):
    model = Model()
    compiled = graphfuse.compile(model, example_inputs=ids(2, 3))
    alive, session = weakref.ref(model), weakref.ref(compiled._session)
    if closed:
        compiled.close()
    del model, compiled
    gc.collect()
    assert alive() is None
    assert session() is None


# --- what a compiled model is ---------------------------------------------------------------------------------------


def test_it_has_the_models_signature_attributes_and_parameters(model):
    compiled = graphfuse.compile(model)
    assert isinstance(compiled, nn.Module)
    assert inspect.signature(compiled) == inspect.signature(model.forward)
    assert compiled.config == {"hidden_size": H}
    assert compiled.layers is model.layers
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
    assert list(compiled.state_dict()) == list(model.state_dict())
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'nope'"):
        _ = compiled.nope


def test_weights_can_be_loaded_through_it(model):
    torch.manual_seed(1)
    other = Model()
    compiled = graphfuse.compile(model, example_inputs=ids(2, 3))
    compiled.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(ids(2, 3)), other(ids(2, 3)))
    assert compiled.report.num_graphs == 1


def test_the_report_before_the_first_call_says_so(model):
    compiled = graphfuse.compile(model)
    assert not compiled.report.traced
    assert "not traced yet" in str(compiled.report)
    compiled(ids(1, 2))
    assert compiled.report.traced


@pytest.mark.parametrize(
    "example_inputs", [ids(2, 3), (ids(2, 3),), [ids(2, 3), torch.ones(H)], {"ids": ids(2, 3), "scale": 2.0}], ids=str
)
def test_example_inputs_trace_at_once(model, example_inputs):
    assert graphfuse.compile(model, example_inputs=example_inputs).report.num_graphs == 1


def test_keywords_constants_and_containers():
    def forward(self, x, parts, *, options):
        y = x @ self.weight + parts["a"][0] * options["scale"]
        return {"out": y, "rest": [parts["a"][1], None], "flag": options["flag"]}

    model = Calls(forward)
    compiled = graphfuse.compile(model)
    for rows in (3, 1):
        x, parts = torch.ones(rows, H), {"a": (torch.ones(H), torch.zeros(2))}
        options = {"scale": 0.5, "flag": "yes"}
        torch.testing.assert_close(
            compiled(x, parts=parts, options=options)["out"], model(x, parts, options=options)["out"]
        )
        assert compiled(x, parts, options=options)["flag"] == "yes"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda m: m.__name__)
def test_it_runs_in_every_mode(model, mode):
    compiled = graphfuse.compile(model)
    with mode():
        out = compiled(ids(2, 3))
        torch.testing.assert_close(compiled(ids(1, 4)), model(ids(1, 4)))
    assert not out.requires_grad
    assert compiled.report.num_graphs == 1


def test_train_and_eval_reach_the_model():
    model = nn.Sequential(nn.Linear(H, H, bias=False), nn.Dropout(0.5)).requires_grad_(False)
    compiled = graphfuse.compile(model.train())
    x = torch.ones(64, H)
    assert not torch.equal(compiled(x), model[0](x))
    compiled.eval()
    assert not model[1].training
    torch.testing.assert_close(compiled(x), model[0](x))


def test_a_closed_model_says_so_and_keeps_its_report(model):
    with graphfuse.compile(model, example_inputs=ids(2, 3)) as compiled:
        compiled(ids(1, 1))
    with pytest.raises(ConfigError, match=r"This compiled model is closed\. Call graphfuse\.compile again\."):
        compiled(ids(1, 1))
    assert compiled.report.num_graphs == 1
    compiled.close()


@pytest.mark.parametrize("settings", [{"fusion": "off"}, {"executor": "eager"}, {"verify": False}], ids=str)
def test_settings_do_not_change_values(model, settings):
    compiled = graphfuse.compile(model, config=FuseConfig(**settings))
    torch.testing.assert_close(compiled(ids(2, 3)), model(ids(2, 3)))


def test_graphs_are_dumped(model, tmp_path):
    graphfuse.compile(model, config=FuseConfig(dump=str(tmp_path)), example_inputs=ids(2, 3))
    assert "graph0_000_before.py" in {path.name for path in tmp_path.iterdir()}


# --- groups ---------------------------------------------------------------------------------------------------------


def test_without_a_group_the_report_says_why_nothing_fuses():
    with fake_tp(2) as group:
        report = trace(Model(2, group), ids(2, 3), None).report
    assert report.totals == {"all_reduce": 2, "fused": 0, "merged": 0, "declined": 2}
    assert {site.outcome() for site in report.sites} == {"no group was given"}


def test_one_rank_compiles_and_the_report_says_why_nothing_fuses():
    with fake_tp(1) as group:
        model = Model(2, group)
        compiled = graphfuse.compile(model, group)
        torch.testing.assert_close(compiled(ids(2, 3)), model(ids(2, 3)))
        assert {s.outcome() for s in compiled.report.sites} == {"the group has one rank: there is nothing to reduce"}
        assert len(compiled.report.sites) == 2


class Coalesced(nn.Module):
    def __init__(self, group) -> None:
        super().__init__()
        self.norm, self.group = nn.RMSNorm(H).requires_grad_(False), group

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = fc.all_reduce_coalesced([x, y], "sum", self.group)
        return self.norm(a + b)


def test_coalesced_reductions_are_listed_and_left_alone():
    with fake_tp(2) as group:
        report = trace(Coalesced(group), (torch.randn(4, H), torch.randn(4, H)), group).report
    assert report.totals == {"all_reduce": 1, "fused": 0, "merged": 0, "declined": 1}
    assert "several tensors in one call" in report.sites[0].outcome()


def test_what_is_no_group_is_refused():
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.raises(GroupError, match=r"tp_group is a str\. Pass a ProcessGroup or a one-dimensional DeviceMesh\."):
        graphfuse.compile(Model(), "tp")
    with fake_tp(4) as group:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(GroupError, match=r"tp_group is a mesh of 2 dimensions\. .* as in mesh\['tp'\]"):
            graphfuse.compile(Model(), mesh)
        assert graphfuse.compile(Model(), mesh["tp"])._session.group.size() == 2
        outside = torch.distributed.new_group([1, 2])
        with pytest.raises(GroupError, match=r"This rank is not in tp_group\. .* on the ranks of the group only"):
            graphfuse.compile(Model(), outside)
        assert graphfuse.compile(Model(), group)._session.group is group


# --- errors ---------------------------------------------------------------------------------------------------------


def test_what_is_no_model_or_config_is_refused(model):
    with pytest.raises(ConfigError, match=r"model is a function\. Pass an nn\.Module"):
        graphfuse.compile(lambda x: x)
    with pytest.raises(ConfigError, match=r"config is a dict\. Pass a graphfuse\.FuseConfig\."):
        graphfuse.compile(model, config={"fusion": "off"})
    model.config = type("Config", (), {"use_kernels": True})()
    with pytest.raises(ConfigError, match=r"loaded with use_kernels=True, .* Load it without\."):
        graphfuse.compile(model)


def test_gradients_are_refused_with_both_remedies():
    message = r"Gradients are on.*torch\.no_grad\(\), or call model\.requires_grad_\(False\)"
    model = nn.Linear(H, H)
    compiled = graphfuse.compile(model)
    with pytest.raises(GradientsEnabledError, match=message):
        compiled(torch.ones(2, H))
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.ones(2, H)), model(torch.ones(2, H)))
    nested = graphfuse.compile(Calls(lambda self, parts: parts["x"] @ self.weight))
    with pytest.raises(GradientsEnabledError, match=message):
        nested({"x": torch.ones(2, H, requires_grad=True)})


def test_required_fusion_that_is_declined_raises_with_the_reasons():
    with fake_tp(2) as group, pytest.raises(FusionRequiredError) as raised:
        config = FuseConfig(fusion="require", disabled_rules={"all_reduce_add_rms_norm"})
        graphfuse.compile(Model(2, group), group, config=config, example_inputs=ids(2, 3))
    assert "2 residual-stream reductions were declined" in str(raised.value)
    assert "layers.1: the rule all_reduce_add_rms_norm is switched off" in str(raised.value)
    assert "use fusion='auto'" in str(raised.value)


def test_a_forced_backend_that_cannot_run_is_named_plainly():
    with fake_tp(2) as group, pytest.raises(BackendUnavailableError, match="flashinfer") as raised:
        config = FuseConfig(allreduce="flashinfer")
        graphfuse.compile(Model(2, group), group, config=config, example_inputs=ids(2, 3))
    assert "torch._dynamo" not in str(raised.value)
    assert type(raised.value) is BackendUnavailableError


def test_a_dump_folder_that_cannot_be_made_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("")
    config = FuseConfig(dump=str(tmp_path / "file" / "dumps"))
    with pytest.raises(ConfigError, match="cannot be made a folder"):
        graphfuse.compile(model, config=config, example_inputs=ids(2, 3))


def test_a_wrong_call_is_the_models_type_error():
    compiled = graphfuse.compile(Model())
    with pytest.raises(TypeError, match="missing a required argument: 'ids'"):
        compiled(idz=torch.zeros(1, 2, dtype=torch.long))


def test_a_compiled_model_is_not_compiled_again():
    with pytest.raises(ConfigError, match=r"compiled already. Compile the original one"):
        graphfuse.compile(graphfuse.compile(Model()))
