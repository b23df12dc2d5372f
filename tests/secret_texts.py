"""Texts as exceptions have them, each with a secret in one form; made up, and none of them is anybody's.

The first 26 are those of an audit; each row of secret_forms.toml is needed by one of them or by one of `MORE`.
"""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """A text, what of it must never be seen, and the row of secret_forms.toml that is there for it."""

    text: str
    secrets: tuple[str, ...]
    row: str


def _hidden(name: str) -> str:
    """A secret that no other text has, with a `/`, which passwords and keys may have."""
    return f"Qz9{name}/x7{name}Wv"


def _long(name: str) -> str:
    """The part of a token behind its prefix."""
    return f"Qz9{name}0123456789x7WvAbCdEf"


FORMS: dict[str, Text] = {
    "url_password": Text(f"cannot reach https://ada:{_hidden('a')}@host/x", (_hidden("a"), "x7aWv"), "url_user"),
    "database_url": Text(f"postgresql://ada:{_hidden('b')}@db:5432/runs failed", (_hidden("b"), "x7bWv"), "url_user"),
    "bearer": Text(f"refused: bearer {_hidden('c')}", (_hidden("c"),), "bearer"),
    "token": Text(f"login failed: token={_hidden('d')}", (_hidden("d"),), "value"),
    "password": Text(f"login failed: password: {_hidden('e')}", (_hidden("e"),), "value"),
    "api_key": Text(f"login failed, api_key={_hidden('f')}", (_hidden("f"),), "value"),
    "hf_token": Text(f"bad line: HF_TOKEN={_hidden('g')}", (_hidden("g"),), "value"),
    "access_token": Text(f"bad form: access_token={_hidden('h')}", (_hidden("h"),), "value"),
    "client_secret": Text(f"bad form: client_secret={_hidden('i')}", (_hidden("i"),), "value"),
    "json": Text(f'bad request: {{"password": "{_hidden("j")} x7jWv"}}', (_hidden("j"), "x7jWv"), "quoted_value"),
    "dict": Text(f"bad request: {{'password': '{_hidden('k')} x7kWv'}}", (_hidden("k"), "x7kWv"), "quoted_value"),
    "s3_v2": Text(
        f"403 for https://b.s3.amazonaws.com/shard-3?AWSAccessKeyId=Qz9id&Expires=1&Signature={_hidden('l')}",
        (_hidden("l"), "Qz9id"),
        "url_query",
    ),
    "s3_v4": Text(
        f"Max retries exceeded with url: /shard-3?X-Amz-Credential=Qz9cr%2F&X-Amz-Signature={_hidden('m')} (timed out)",
        (_hidden("m"), "Qz9cr"),
        "url_query",
    ),
    "azure_sas": Text(
        f"404: https://a.blob.core.windows.net/c/shard-3?sv=2022-11-02&sp=r&sig={_hidden('n')}",
        (_hidden("n"),),
        "url_query",
    ),
    "account_key": Text(
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={_hidden('o')}==;EndpointSuffix=x",
        (_hidden("o"),),
        "value",
    ),
    "aws_secret": Text(f"bad profile: AWS_SECRET_ACCESS_KEY={_hidden('p')}", (_hidden("p"),), "value"),
    "basic": Text("401 for Authorization: Basic UXo5cTpRejlx", ("UXo5cTpRejlx",), "header"),
    "password_option": Text(f"cannot run: get --password {_hidden('r')} x", (_hidden("r"),), "option"),
    "token_option": Text(f"Command '['get', '--token', '{_hidden('s')}']' returned 1", (_hidden("s"),), "option"),
    "hugging_face": Text(f"invalid: hf_{_long('t')}", (_long("t"),), "hugging_face"),
    "openai": Text(f"not known: sk-proj-{_long('u')}", (_long("u"),), "openai"),
    "aws_key_id": Text("not known: AKIAQZ9VIOSFODNN7EXA", ("QZ9VIOSFODNN7EXA",), "aws_key_id"),
    "github": Text(f"cannot clone with ghp_{_long('w')}", (_long("w"),), "github"),
    "web_token": Text(
        f"expired: eyJ{_long('xh')}.eyJ{_long('xb')}.{_long('xs')}",
        (_long("xh"), _long("xb"), _long("xs")),
        "web_token",
    ),
    "private_key": Text(
        f"cannot load -----BEGIN OPENSSH PRIVATE KEY----- {_long('y')} -----END OPENSSH PRIVATE KEY-----",
        (_long("y"),),
        "private_key",
    ),
    "cookie": Text(f"403 for Cookie: theme=dark; sessionid={_hidden('z')}", (_hidden("z"),), "header"),
}

MORE: dict[str, Text] = {
    "query_with_at": Text(f"https://host/x?mail=a@b&sig={_hidden('a2')}", (_hidden("a2"),), "url_query"),
    "question_mark_in_password": Text(f"https://ada:Qz9?{_hidden('b2')}@host/x", (_hidden("b2"), "Qz9?"), "url_user"),
    "escaped_json": Text(
        f'body was "{{\\"password\\": \\"{_hidden("c2")} x7c2Wv\\"}}"', (_hidden("c2"), "x7c2Wv"), "quoted_value"
    ),
    "escaped_quote": Text(f"{{'secret': 'Qz9\\'{_hidden('d2')}'}}", (_hidden("d2"), "Qz9"), "quoted_value"),
    "pair": Text(f"[('authorization', 'Basic {_hidden('e2')}')]", (_hidden("e2"),), "header"),
    "bytes": Text(f"password=b'Qz9 {_hidden('f2')}'", (_hidden("f2"), "Qz9"), "quoted_value"),
    "query_of_any_name": Text(f"404 for url: /x?ticket={_hidden('w2')}", (_hidden("w2"),), "url_query"),
    "cookie_of_any_name": Text(f"Set-Cookie: theme=dark; trail={_hidden('x2')}", (_hidden("x2"),), "header"),
    "fragment": Text(f"https://host/#id={_hidden('g2')}", (_hidden("g2"),), "url_fragment"),
    "basic_alone": Text("sent Basic UXo5aDI6UXo5aDI=", ("UXo5aDI6UXo5aDI",), "basic"),
    "curl_user": Text(f"curl -u ada:{_hidden('i2')} host", (_hidden("i2"),), "option_user"),
    "key_provided": Text(f"Incorrect API key provided: {_hidden('j2')}", (_hidden("j2"),), "key_said"),
    "private_key_line": Text(f"head\n{'Qz9k2' * 12}=\ntail", ("Qz9k2",), "private_key_line"),
    "private_key_lines": Text(
        f"-----BEGIN RSA PRIVATE KEY-----\n{'Qz9l2' * 12}\nQz9l2==\n-----END RSA PRIVATE KEY-----",
        ("Qz9l2",),
        "private_key",
    ),
    "private_key_without_end": Text("-----BEGIN PRIVATE KEY----- Qz9m2 Qz9m2", ("Qz9m2",), "private_key"),
    "wandb": Text(f"WANDB_API_KEY: {_hidden('n2')}", (_hidden("n2"),), "value"),
    "stripe": Text(f"sk_live_{_long('o2')}", (_long("o2"),), "stripe"),
    "gitlab": Text(f"glpat-{_long('p2')}", (_long("p2"),), "gitlab"),
    "slack": Text(f"xoxb-{_long('q2')}", (_long("q2"),), "slack"),
    "google": Text(f"AIza{_long('r2')}", (_long("r2"),), "google"),
    "nvidia": Text(f"nvapi-{_long('s2')}", (_long("s2"),), "nvidia"),
    "package_index": Text(f"npm_{_long('t2')}", (_long("t2"),), "package_index"),
    "sql_server": Text(f"DRIVER=x;UID=sa;PWD={_hidden('u2')}", (_hidden("u2"),), "value"),
    "github_pat": Text(f"github_pat_{_long('v2')}", (_long("v2"),), "github"),
}

PLAIN = (
    "the shard of rank 1 is empty",
    "expected 4096 tokens: got 3",
    "tokenizer: cannot load /data/tokenizer.json",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "CUDA error: an illegal memory access was encountered",
    "[Errno 2] No such file or directory: 's3://bucket/dt=2026-11-23/shard-3'",
    "cannot read https://host/path/shard-3.tar",
    "KeyError: 'input_ids'",
    "max_new_tokens=128 is too many",
    "step 12/900 - loss 2.31 - lr 3e-4 - tokens/s 41200",
)
