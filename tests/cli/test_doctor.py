"""`graphfuse doctor`: its data, and what a terminal shows of it."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from graphfuse.cli import doctor
from graphfuse.gate import Decision, SizeRange
from tests.hosts import H200_PEER, H200_RANK


def shown(data):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(doctor.layout(data))
    return console.export_text()


def test_render_prints_it(capsys):
    doctor.render(doctor.collect())
    assert torch.__version__ in capsys.readouterr().out


def test_on_the_cpu_it_says_that_there_is_no_gpu_and_who_serves():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    data = doctor.collect()
    json.dumps(data)
    text = shown(data)
    assert torch.__version__ in text
    assert "No GPU" in text
    assert "nothing to reduce" in text


@pytest.fixture
def two_h200(monkeypatch):
    """A host of two H200s; returns what to change about its ranks."""
    changes: dict = {}
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, uuid="0")

    def probe(device):
        rank = (H200_RANK, H200_PEER)[device.index]
        return dataclasses.replace(rank, **changes)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(doctor, "probe", probe)
    return changes


def test_on_two_h200_it_shows_links_and_who_serves_which_sizes(two_h200, monkeypatch):
    ranges = (
        SizeRange(64 * 8192, "flashinfer", "oneshot"),
        SizeRange(512 * 8192, "symm_mem", "one_shot"),
        SizeRange(2048 * 8192, "symm_mem", "two_shot"),
        SizeRange(None, "reference"),
    )
    monkeypatch.setattr(doctor, "decide", lambda facts, **tensors: Decision(True, ranges))
    data = doctor.collect()
    json.dumps(data)
    text = shown(data)
    assert data["gpus"][0]["nvlink_to"] == [1]
    assert "NVIDIA H200" in text
    assert (
        "by flashinfer up to 64 tokens of hidden size 4096, by symm_mem up to 2048 tokens, "
        "by the reference backend above." in text
    )


def test_one_backend_at_every_size_needs_no_sizes(two_h200, monkeypatch):
    decision = Decision(True, (SizeRange(8192, "symm_mem", "one_shot"), SizeRange(None, "symm_mem", "two_shot")))
    monkeypatch.setattr(doctor, "decide", lambda facts, **tensors: decision)
    assert doctor.collect()["gate"]["answer"] == "by symm_mem."


def test_without_flashinfer_it_says_how_to_get_it_and_symm_mem_serves(two_h200):
    two_h200.update(flashinfer=None)
    text = shown(doctor.collect())
    assert "by symm_mem" in text
    assert 'pip install "graphfuse[cuda]"' in text


def test_where_nothing_can_serve_it_says_why(two_h200):
    two_h200.update(flashinfer=None, triton=None)
    text = shown(doctor.collect())
    assert "left as plain operations" in text
    assert "Triton is not installed" in text


def test_unknown_links_show_as_unknown(two_h200):
    two_h200.update(nvlink_peers=None, access_peers=None, notes=("GPU links are unknown because NVML does not start.",))
    data = doctor.collect()
    assert data["gpus"][0]["nvlink_to"] is None
    text = shown(data)
    assert "unknown" in text
    assert "NVML does not start" in text
