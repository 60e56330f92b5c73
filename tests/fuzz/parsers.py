"""Every parser of files and settings that others wrote, as something to feed bytes to.

A `Parser` reads one input in a folder of its own, and goes on with what it read as its users do: a parser that lets
through what breaks the next step has not done its work. It raises `GraphfuseError` or returns. Beside the folder there
is another one, `outside`, in which nothing may be opened, and code that leaves a mark if it is run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from graphfuse import backend
from graphfuse.comm.symm_mem import TIMEOUT_VARIABLE, spin_limit
from graphfuse.comm.table import FOLDER, TABLE_FOLDER_VARIABLE, SizeTable, find_table, table_folders
from graphfuse.config import FuseConfig
from graphfuse.errors import GraphfuseError
from graphfuse.facts import Facts
from graphfuse.gate import decide
from graphfuse.generation.tokenize import eos_token_ids, load_tokenizer
from graphfuse.tuning.allreduce_result import Result
from graphfuse.tuning.allreduce_text import summary_lines
from graphfuse.weights.files import DTYPES, find_tensors
from graphfuse.weights.load import load, local_folder
from graphfuse.weights.plan import Copy
from graphfuse.weights.stream import Reader
from tests.documents import ROOT
from tests.fuzz import documents, moe_configs, moe_results, moe_tuning, prompts
from tests.fuzz.checks import check_message, keys_of, lines_of
from tests.generation.conftest import make_tokenizer
from tests.models import tiny


@dataclass(frozen=True)
class Parser:
    """`prepare(folder)` once, then `read(folder, data)` as often as wanted; `inputs` makes what to read.

    `read` may say in a few words what became of an input that it did not refuse as a whole.
    """

    name: str
    inputs: documents.Generator
    read: Callable[[Path, bytes], str | None]
    prepare: Callable[[Path], None] = lambda folder: None


# config.json, and the models that are made from it

LLAMA = tiny.config("llama").to_dict() | {
    "num_hidden_layers": 1,
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
}
CANARY = {"auto_map": {"AutoConfig": "code.Canary", "AutoModelForCausalLM": "code.CanaryForCausalLM"}}
CONFIGS = [
    LLAMA,
    *(tiny.config(family).to_dict() for family in ("llama", "mistral", "qwen3", "qwen3_moe")),
    {"model_type": "mistral3", "text_config": tiny.config("mistral").to_dict()},
    {"model_type": "canary"} | CANARY,
    LLAMA | CANARY,
]  # fmt: skip
CONFIGS = json.loads(json.dumps(CONFIGS))
CONFIG_WORDS = [
    *keys_of(CONFIGS), *(c["model_type"] for c in CONFIGS), "gpt2", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2",
    "llama3", "yarn", "linear", "dynamic", "longrope", "float16", "bfloat16", "float8_e4m3fn", "int8", "silu", "gelu",
    "quantization_config", "transformers_weights", "sliding_attention", "full_attention", "code.Canary", "Canary",
]  # fmt: skip


def prepare_config(folder: Path) -> None:
    config = tiny.LlamaConfig(**{k: v for k, v in LLAMA.items() if k not in ("architectures", "dtype")})
    torch.manual_seed(0)
    tiny.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def read_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    model: Any = load(folder, implementation="graphfuse", device="cpu")
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))


# safetensors: a header, an index

TENSORS = {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(0), "d": torch.ones(())}
HEADERS = [
    {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "F32", "shape": [0], "data_offsets": [32, 32]},
        "d": {"dtype": "F32", "shape": [], "data_offsets": [32, 36]},
        "e": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [36, 40]},
    },
    {"__metadata__": {"format": "pt"}, "a": {"dtype": "F64", "shape": [5], "data_offsets": [0, 40]}},
]
HEADER_WORDS = [*keys_of(HEADERS), *DTYPES, "F4", "I64", "BOOL", 24, 32, 36, 40, 41, 12, [0, 24], [24, 0], [2, 3]]


def read_header(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    stored = find_tensors(folder)
    for tensor in stored.values():
        if tensor.dtype not in DTYPES:
            continue
        reader = Reader(tensor.file)  # safetensors has its say, too
        into = torch.full(tensor.shape, -1, dtype=DTYPES[tensor.dtype])
        reader.copy(tensor, Copy((slice(None),) * len(tensor.shape), into))
        reader.close()
        with safe_open(tensor.file, framework="pt") as handle:
            assert tuple(handle.get_slice(tensor.name).get_shape()) == tensor.shape
            assert set(handle.keys()) == set(stored)


INDICES = [
    {"metadata": {"total_size": 36}, "weight_map": {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
]
INDEX_WORDS = [
    *keys_of(INDICES), "1.safetensors", "2.safetensors", "2", "3.safetensors", "sub/1.safetensors", "sub",
    "./1.safetensors", "../outside", "../model/1.safetensors", "config.json", "pytorch_model.bin", "1.safetensors\0",
    "out.safetensors",
]  # fmt: skip


def prepare_index(folder: Path) -> None:
    save_file({name: TENSORS[name] for name in "ab"}, folder / "1.safetensors")
    save_file({name: TENSORS[name] for name in "c"}, folder / "2.safetensors")
    (folder / "sub").mkdir()
    save_file(TENSORS, folder / "sub" / "1.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def read_index(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors.index.json").write_bytes(data)
    for tensor in find_tensors(local_folder(folder)).values():
        assert tensor.file.parent == folder


# the tokenizer's files

TOKENIZERS = [
    {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>", "eos_token_id": 1,
     "chat_template": "{{ messages[0]['content'] }}", "model_max_length": 100},
    {"tokenizer_class": "CanaryTokenizer", "auto_map": {"AutoTokenizer": ["code.CanaryTokenizer", None]}},
    {"eos_token_id": [1, 2], "added_tokens_decoder": {"5": {"content": "<x>", "special": True}}, "init_inputs": []},
]  # fmt: skip
TOKENIZER_WORDS = [
    *keys_of(TOKENIZERS), "vocab_file", "merges_file", "gguf_file", "tokenizer_file", "special_tokens_map_file",
    "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "BertTokenizer", "T5Tokenizer",
    "init_inputs", "extra_special_tokens", "fast_tokenizer_files", ["@outside/vocab.json"] * 2,
    "@outside/vocab.json", "../outside/vocab.json",
]  # fmt: skip


def prepare_tokenizer(folder: Path) -> None:
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))


def read_tokenizer(folder: Path, data: bytes) -> None:
    """The bytes are generation_config.json first, then tokenizer_config.json."""
    (folder / "generation_config.json").write_bytes(data)
    config = tiny.config("llama")
    with contextlib.suppress(GraphfuseError):
        assert all(isinstance(i, int) for i in eos_token_ids(folder, config, make_tokenizer()))
    (folder / "tokenizer_config.json").write_bytes(data)
    (folder / "generation_config.json").unlink()
    eos_token_ids(folder, config, load_tokenizer(folder))


# tables, results and facts

TABLES = [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))[:2]]
for _table in TABLES:
    _table["provenance"]["measured"] = _table["provenance"]["measured"][:2]
TABLE_WORDS = [
    *keys_of(TABLES),
    "flashinfer",
    "oneshot",
    "symm_mem",
    "one_shot",
    "two_shot",
    "reference",
    "float32",
    1 << 29,
]


def read_table(folder: Path, data: bytes) -> None:
    file = folder / "table.json"
    file.write_bytes(data)
    table = SizeTable.read(file)
    for hidden_size in (1, 2048, 10**9):
        assert table.ranges(hidden_size)[-1].max_bytes is None
    assert all(us > 0 for row in table.measured for us in row.us.values())
    written = table.write(folder / "tables")
    assert written.parent == folder / "tables"
    assert SizeTable.read(written) == table
    assert find_table(table.device_name, table.world_size, "bfloat16", [written.parent]) in (table, None)
    facts = Facts(
        "cuda", table.world_size, gpu=table.device_name, compute_capability=(9, 0), nvlink_mesh=True, peer_access=True,
        torch="2.11", triton="3.6", flashinfer="0.7.2",
    )  # fmt: skip
    json.dumps(decide(facts, dtype=torch.bfloat16, hidden_size=4096, tables=[written.parent]).to_json())
    written.unlink()


RESULTS = [
    json.loads(file.read_text()) for file in sorted((ROOT / "benchmarks" / "results").glob("allreduce_h*.json"))[:2]
]
for _result in RESULTS:
    _result["rows"] = [*_result["rows"][:1], *_result["rows"][-1:]]
RESULT_WORDS = [*keys_of(RESULTS), "unfused", "dispatched", "link", 1024, 8192]


def read_result(folder: Path, data: bytes) -> None:
    file = folder / "result.json"
    file.write_bytes(data)
    result = Result.read(file)
    "\n".join(summary_lines(result)).encode()
    result.write(file)
    assert Result.read(file) == result


FACTS = [json.loads(file.read_text()) for file in sorted((ROOT / "configs" / "facts").glob("*.json"))]
FACTS_WORDS = [*keys_of(FACTS), "cpu", "cuda", "0.7.2", "0.7.2.post1", "2.11.0+cu130", [9, 0], [8, 0], "NVIDIA H200"]


def read_facts(folder: Path, data: bytes) -> None:
    file = folder / "facts.json"
    file.write_bytes(data)
    facts = Facts.from_json(file)
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    for described in (facts, facts.for_world_size(4)):
        for dtype, hidden_size in ((torch.bfloat16, 4096), (torch.float32, 7)):
            decision = decide(described, dtype=dtype, hidden_size=hidden_size, tables=[folder, FOLDER])
            json.dumps(decision.to_json(), ensure_ascii=False).encode()


# settings: FuseConfig's options, and the environment

VARIABLES = ("GRAPHFUSE_FUEL", TIMEOUT_VARIABLE, TABLE_FOLDER_VARIABLE)
SETTINGS = [
    {"options": {"fusion": "auto", "executor": "eager", "allreduce": "reference", "tier": "faithful", "verify": True,
                 "disabled_rules": ["all_reduce_rms_norm"], "rules": None, "moe_config_dir": ".", "dump": None},
     "environment": {"GRAPHFUSE_FUEL": "3", TIMEOUT_VARIABLE: "2.5", TABLE_FOLDER_VARIABLE: "."}},
]  # fmt: skip
SETTING_WORDS = [*keys_of(SETTINGS), "off", "require", "inductor", "symm_mem", "relaxed", "1e3", "1_0", "٣", "inf"]


def read_settings(folder: Path, data: bytes) -> str:
    """One JSON document of both; what is no such document is given as the options, or as each variable."""
    try:
        settings = json.loads(data)
    except (ValueError, RecursionError):
        settings = data.decode("latin-1")
    options = settings.get("options") if isinstance(settings, dict) else settings
    environment = settings.get("environment") if isinstance(settings, dict) else None
    if not isinstance(environment, dict):
        environment = dict.fromkeys(
            ("GRAPHFUSE_FUEL", TIMEOUT_VARIABLE, TABLE_FOLDER_VARIABLE, "GRAPHFUSE_DUMP"), environment
        )
    ways = []
    before = dict(os.environ)
    for name, value in environment.items():
        if name in VARIABLES and isinstance(value, str) and "\0" not in value:
            os.environ[name] = value.encode("utf-8", "replace").decode()
    try:
        for read in (lambda: FuseConfig.from_options(options), backend._fuel, spin_limit, table_folders):
            try:
                read()
            except GraphfuseError as error:
                check_message(error)
                ways += lines_of(error)[-1:]
    finally:
        os.environ.clear()
        os.environ.update(before)
    return " ".join(ways[:1])


PARSERS = {
    parser.name: parser
    for parser in (
        Parser("config", documents.json_files(CONFIGS, CONFIG_WORDS), read_config, prepare_config),
        Parser("header", documents.safetensors_files(HEADERS, HEADER_WORDS, 40), read_header),
        Parser("index", documents.json_files(INDICES, INDEX_WORDS), read_index, prepare_index),
        Parser("tokenizer", documents.json_files(TOKENIZERS, TOKENIZER_WORDS), read_tokenizer, prepare_tokenizer),
        Parser("prompts", documents.json_lines(prompts.LINES, prompts.LINE_WORDS), prompts.read_prompts),
        Parser("answers", documents.json_lines(prompts.ANSWERS, prompts.ANSWER_WORDS), prompts.read_answers),
        Parser("table", documents.json_files(TABLES, TABLE_WORDS), read_table),
        Parser(
            "moe_config",
            documents.json_files(moe_configs.CONFIGS, moe_configs.CONFIG_WORDS),
            moe_configs.read_config,
            moe_configs.prepare_config,
        ),
        Parser("result", documents.json_files(RESULTS, RESULT_WORDS), read_result),
        Parser(
            "moe_result",
            documents.json_files(moe_results.RESULTS, moe_results.RESULT_WORDS),
            moe_results.read_result,
        ),
        Parser(
            "moe_figures",
            documents.json_files(moe_results.FIGURES, moe_results.FIGURE_WORDS),
            moe_results.read_figures,
        ),
        Parser("moe_shape", documents.json_files(moe_tuning.SHAPES, moe_tuning.SHAPE_WORDS), moe_tuning.read_shape),
        Parser("moe_journal", moe_tuning.journals, moe_tuning.read_journal),
        Parser("facts", documents.json_files(FACTS, FACTS_WORDS), read_facts),
        Parser("settings", documents.json_files(SETTINGS, SETTING_WORDS), read_settings),
    )
}
