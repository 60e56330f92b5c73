"""OpenAI's batch format: requests of an input file, and the answers to them.

    in    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […], …}}
          {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "text", …}}
    out   {"id", "custom_id", "response": {"status_code": 200, "request_id", "body": {"choices", "usage", …}},
           "error": null}
          {"id", "custom_id", "response": null, "error": {"code", "message"}}

Fields of a body that say who asks, or where, are left alone. One that would change the answer and that there is nothing
for makes its line an error. Fields that a body lacks take the values of the command line, also where OpenAI has others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from graphfuse.errors import brief
from graphfuse.generation.completion import Completion
from graphfuse.generation.record import SAMPLING_FIELDS, Endpoint, Record, Unusable, sampling_fields

_URLS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
_LEFT_ALONE = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("stream_options", "parallel_tool_calls"),
}
_DOES_NOTHING: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""Fields that are served with these values only."""

LEAST_LOGPROB = -9999.0
"""What a log probability of -inf is written as, since JSON has no infinity."""

TokenText = Callable[[int], str]
"""The text of one token."""


def read_request(record: Record, data: dict[str, Any]) -> Record:
    """The record, with what its line asks for.

    Raises:
        Unusable: it asks for something that there is not.
    """
    where = f"line {record.line}"
    method, url, body = data.get("method", "POST"), data.get("url"), data.get("body")
    endpoint = _URLS.get(url) if isinstance(url, str) else None
    if method != "POST" or endpoint is None:
        known = " or ".join(_URLS)
        raise Unusable(f"The request of {where} is {brief(method)} {brief(url)}. Use POST with {known}.")
    if not isinstance(body, dict):
        raise Unusable(f'The "body" of {where} is not an object. Write the request into it.')
    fields = dict(body)
    prompt = _messages(fields, where) if endpoint == "chat" else _text(fields, where)
    _rename(fields, endpoint, where)
    for name, value in fields.items():
        allowed = _DOES_NOTHING.get(name, ())
        if value is not None and name not in (*SAMPLING_FIELDS, *_LEFT_ALONE) and value not in allowed:
            raise Unusable(f"The {brief(name)} of {where} is {brief(value)}, which is not served. Leave it out.")
    is_raw = endpoint == "completions"
    sampling = sampling_fields(fields, where)
    return replace(record, endpoint=endpoint, prompt=prompt, is_raw=is_raw, sampling=sampling)


def _messages(fields: dict[str, Any], where: str) -> list[dict[str, Any]]:
    messages = fields.pop("messages", None)
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Unusable(f'The "messages" of {where} are no list of objects with at least one. Write them so.')
    return [_as_text(message, where) for message in messages]


def _as_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with its content as one text, which may have been in parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Unusable(f"A message of {where} has the part {brief(part)}, which is not text. Give only text.")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _text(fields: dict[str, Any], where: str) -> str | list[int]:
    prompt = fields.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    is_ids = isinstance(prompt, list) and all(type(i) is int for i in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise Unusable(f'The "prompt" of {where} is neither text nor one list of token ids. Give one of them a line.')
    if not prompt:
        raise Unusable(f'The "prompt" of {where} is empty. Give some text to answer.')
    return prompt


def _rename(fields: dict[str, Any], endpoint: Endpoint, where: str) -> None:
    """OpenAI's names become those of `SamplingParams`."""
    most = fields.pop("max_completion_tokens", None)
    if most is not None:
        fields["max_tokens"] = most
    if endpoint == "chat":
        wanted, top = fields.pop("logprobs", None), fields.pop("top_logprobs", None)
        if wanted is not None and not isinstance(wanted, bool):
            raise Unusable(f'The "logprobs" of {where} is {brief(wanted)}. Give true or false.')
        if wanted:
            fields["logprobs"] = 0 if top is None else top
    form = fields.pop("response_format", None)
    if form is None or form == {"type": "text"}:
        return
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        fields["json_schema"] = {"type": "object", "additionalProperties": True}
        return
    inner = form.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise Unusable(f'The "response_format" of {where} is {brief(form)}. Use text, json_object or json_schema.')
    fields["json_schema"] = inner["schema"]


def answer(
    record: Record, completions: Sequence[Completion], model: str, *, token_ids: bool, token_text: TokenText
) -> dict[str, Any]:
    """The line of output for a request that was completed by `model`."""
    name = record.key.hex()
    is_chat = record.endpoint == "chat"
    choices = []
    for index, completion in enumerate(completions):
        choice: dict[str, Any] = {"index": index}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": completion.text}
            choice["logprobs"] = _chat_logprobs(completion, token_text)
        else:
            choice["text"] = completion.text
            choice["logprobs"] = _text_logprobs(completion, token_text)
        choice["finish_reason"] = completion.finish_reason
        if token_ids:
            choice["token_ids"] = completion.token_ids
        choices.append(choice)
    num_prompt = len(completions[0].prompt_token_ids)
    num_new = sum(len(completion.token_ids) for completion in completions)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage,
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": record.id, "response": response, "error": None}


def refusal(record: Record, message: str) -> dict[str, Any]:
    """The line of output for a request that cannot be served. Where another has its id, the line is told instead."""
    named = {"custom_id": record.id} if record.id is not None else {"custom_id": None, "line": record.line}
    error = {"code": "invalid_request", "message": message}
    return {"id": f"batch_req_{record.key.hex()}", **named, "response": None, "error": error}


def _chat_logprobs(completion: Completion, token_text: TokenText) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        whole = None if "\ufffd" in text else list(text.encode())  # of part of a character, the bytes are not known
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": whole}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*each) for each in token.top]}
        for token in completion.logprobs
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(completion: Completion, token_text: TokenText) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    texts = [token_text(token.token_id) for token in completion.logprobs]
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in completion.logprobs],
        "top_logprobs": [
            {token_text(token_id): max(logprob, LEAST_LOGPROB) for token_id, logprob in token.top}
            for token in completion.logprobs
        ],
        "text_offset": offsets[: len(texts)],
    }
