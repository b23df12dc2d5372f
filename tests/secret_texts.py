"""Exception texts, each with a secret in one form. All secrets are invented.

The first 26 are from an audit. Each row of secret_forms.toml masks at least one of them or of `MORE`. The texts of
`PLAIN` hold no secret and must not change.
"""

from typing import NamedTuple


class Text(NamedTuple):
    """A text, its parts that must never be shown, and the row of secret_forms.toml that hides them."""

    text: str
    secrets: tuple[str, ...]
    row: str


def _hidden(name: str) -> str:
    """Return a secret that only one text has. It contains a `/`, as passwords and keys may."""
    return f"Qz9{name}/x7{name}Wv"


def _long(name: str) -> str:
    """Return a long token without the prefix of a known service."""
    return f"Qz9{name}0123456789x7WvAbCdEf"


FORMS: dict[str, Text] = {
    "url_password": Text(f"cannot reach https://ada:{_hidden('a')}@host/x", (_hidden("a"), "x7aWv"), "url_user"),
    "database_url": Text(f"postgresql://ada:{_hidden('b')}@db:5432/runs failed", (_hidden("b"), "x7bWv"), "url_user"),
    "bearer": Text(f"refused: bearer {_hidden('c')}", (_hidden("c"),), "bearer"),
    "token": Text(f"login failed: token={_hidden('d')}", (_hidden("d"),), "random_value"),
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
    "token_option": Text(f"Command '['get', '--token', '{_hidden('s')}']' returned 1", (_hidden("s"),), "random_value"),
    "hugging_face": Text(f"invalid: hf_{_long('t')}", (_long("t"),), "hugging_face"),
    "openai": Text(f"not known: sk-proj-{_long('u')}", (_long("u"),), "openai"),
    "aws_key_id": Text("not known: AKIAQZ9VIOSFODNN7EXA", ("QZ9VIOSFODNN7EXA",), "aws_key_id"),
    "github": Text(f"cannot clone with ghp_{_long('w')}", (_long("w"),), "vendor_token"),
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
    "key_provided": Text(f"Incorrect API key provided: {_hidden('j2')}", (_hidden("j2"),), "random_said"),
    "private_key_line": Text(f"head\n{'Qz9k2' * 12}=\ntail", ("Qz9k2",), "private_key_line"),
    "private_key_lines": Text(
        f"-----BEGIN RSA PRIVATE KEY-----\n{'Qz9l2' * 12}\nQz9l2==\n-----END RSA PRIVATE KEY-----",
        ("Qz9l2",),
        "private_key",
    ),
    "private_key_without_end": Text("-----BEGIN PRIVATE KEY----- Qz9m2 Qz9m2", ("Qz9m2",), "private_key"),
    "wandb": Text(f"WANDB_API_KEY: {_hidden('n2')}", (_hidden("n2"),), "value"),
    "stripe": Text(f"sk_live_{_long('o2')}", (_long("o2"),), "vendor_token"),
    "gitlab": Text(f"glpat-{_long('p2')}", (_long("p2"),), "vendor_token"),
    "slack": Text(f"xoxb-{_long('q2')}", (_long("q2"),), "vendor_token"),
    "google": Text(f"AIza{_long('r2')}", (_long("r2"),), "vendor_token"),
    "nvidia": Text(f"nvapi-{_long('s2')}", (_long("s2"),), "vendor_token"),
    "package_index": Text(f"npm_{_long('t2')}", (_long("t2"),), "vendor_token"),
    "sql_server": Text(f"DRIVER=x;UID=sa;PWD={_hidden('u2')}", (_hidden("u2"),), "value"),
    "github_pat": Text(f"github_pat_{_long('v2')}", (_long("v2"),), "vendor_token"),
    "sharing_signature": Text(f"SharedAccessSignature sr=x&sig={_hidden('a3')}&se=1", (_hidden("a3"),), "random_value"),
    "prefix_behind_newline": Text(f"'bad\\nhf_{_long('b3')}'", (_long("b3"),), "hugging_face"),
    "prefix_behind_tab": Text(f"'bad\\tghp_{_long('c3')}'", (_long("c3"),), "vendor_token"),
    "prefix_behind_colour": Text(f"\x1b[31mhf_{_long('d3')}\x1b[0m", (_long("d3"),), "hugging_face"),
    "name_behind_newline": Text(f"'bad\\npass={_hidden('e3')}'", (_hidden("e3"),), "random_value"),
    "list": Text(f"'api_key': ['{_hidden('f3')}', '{_hidden('g3')}']", (_hidden("f3"), _hidden("g3")), "list"),
    "list_of_tokens": Text(f"tokens=['{_long('h3')}', '{_long('i3')}']", (_long("h3"), _long("i3")), "random_list"),
    "dict_of_secrets": Text(f"secrets={{'wandb': '{_hidden('j3')}'}}", (_hidden("j3"),), "list"),
    "plural": Text(f"passwords: {_hidden('k3')}", (_hidden("k3"),), "value"),
    "suffix": Text(f"TOKEN_PROD={_hidden('l3')}", (_hidden("l3"),), "random_value"),
    "suffix_of_password": Text("PASSWORD_DB=Qzkraken", ("Qzkraken",), "value"),
    "long_suffix": Text(f"token_for_the_big_hub_x={_hidden('m3')}", (_hidden("m3"),), "random_value"),
    "key_in_environment": Text(f"MINIO_KEY={_hidden('n3')}", (_hidden("n3"),), "random_value"),
    "storage_key": Text("S3_KEY=Qzkraken", ("Qzkraken",), "value"),
    "personal_access": Text(f"GH_PAT={_hidden('o3')}", (_hidden("o3"),), "random_value"),
    "auth": Text(f'{{"auths": {{"r": {{"auth": "{_hidden("p3")}"}}}}}}', (_hidden("p3"),), "random_value"),
    "letters_behind_a_weak_name": Text(f"token={'QzKraken' * 4}", ("Kraken",), "random_value"),
    "jwt": Text(f"jwt={_hidden('q3')}", (_hidden("q3"),), "random_value"),
    "creds": Text(f"creds={_hidden('r3')}", (_hidden("r3"),), "random_value"),
    "letters_behind_a_strong_name": Text("password=Qzkraken", ("Qzkraken",), "value"),
    "password_with_its_type": Text("password: str = 'Qzkraken'", ("Qzkraken",), "quoted_value"),
    "password_said": Text("wrong password 'Qzkraken' for ada", ("Qzkraken",), "said"),
    "password_said_without_quotes": Text(f"wrong password {_hidden('s3')} for ada", (_hidden("s3"),), "random_said"),
    "auth_option": Text(f"cannot run: get --auth {_hidden('h4')} x", (_hidden("h4"),), "random_option"),
    "options_password": Text("cannot run: get --password Qzkraken x", ("Qzkraken",), "option"),
    "slack_hook": Text(f"404: https://hooks.slack.com/services/T0/B0/{_long('t3')}", (_long("t3"),), "webhook"),
    "discord_hook": Text(f"404: https://discord.com/api/webhooks/12/{_long('u3')}", (_long("u3"),), "webhook"),
    "telegram": Text(f"404: https://api.telegram.org/bot123456:{_long('v3')}Q/send", (_long("v3"),), "telegram"),
    "groq": Text(f"gsk_{_long('w3')}", (_long("w3"),), "vendor_token"),
    "vault": Text(f"hvs.{_long('x3')}", (_long("x3"),), "vendor_token"),
    "sendgrid": Text(f"SG.{_long('y3')}.{_long('z3')}", (_long("y3"), _long("z3")), "vendor_token"),
    "databricks": Text("dapi0123456789abcdef0123456789abcdef", ("456789abcdef",), "vendor_token"),
    "replicate": Text(f"r8_{_long('a4')}", (_long("a4"),), "vendor_token"),
    "google_oauth": Text(f"GOCSPX-{_long('b4')}", (_long("b4"),), "vendor_token"),
    "wandb_login": Text(f"wandb login {'0123456789' * 3}abcdef0123", ("abcdef",), "wandb_key"),
    "element": Text("<Db><password>Qzkraken</password></Db>", ("Qzkraken",), "element"),
    "private_key_in_repr": Text(f"'{'Qz9c4Ab8' * 8}\\n{'Qz9d4Ab8' * 8}'", ("Qz9c4", "Qz9d4"), "private_key_line"),
    "private_key_behind_spaces": Text(f"head\n  {'Qz9e4Ab8' * 8}", ("Qz9e4",), "private_key_line"),
    "curl_user_in_a_list": Text(f"['curl', '-u', 'ada:{_hidden('f4')}']", (_hidden("f4"),), "option_user"),
    "curl_user_without_space": Text(f"curl -uada:{_hidden('g4')} x", (_hidden("g4"),), "option_user"),
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
    # Names and prefixes of secrets in everyday training texts.
    "the padding token is not set",
    "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
    "pad_token: <pad> eos_token: </s>",
    "tokenizer.pad_token = tokenizer.eos_token",
    "Expected pad_token_id=0",
    "eos_token_id: 2 is out of range",
    "unknown token: '▁hello'",
    "Unexpected token: '}' at line 3",
    "SyntaxError: invalid token: 0777",
    "token=17 is out of vocabulary of 16",
    "the next token is 13",
    "token is None",
    "token: <|reserved_special_token_12ab|>",
    "tokens=['hello', 'world', '▁the', '2nd']",
    "tokens: [1, 2, 3]",
    "loss_per_token=2.31",
    "per_token: 3.2 ms",
    "ms/token: 12.5ms/iter",
    "use_auth_token=True",
    "private key: none",
    "forward pass: 3.2 s, backward pass: 6.1 s",
    "pass: 12 of 30",
    "forward pass: 1024x1024x3 images",
    "KeyError: the key is missing from the state dict",
    "the key was not found in rank 3's shard",
    "unexpected key: model.layers.12.conv2d_1.weight",
    "Missing key(s) in state_dict: 'blocks.3a.conv2d.weight'",
    "collective key is 3, rank 4 has 5",
    "--pad-token <pad> --max-len 3",
    "train.py --tokenizer-name gpt2 --key value",
    "signature: (Tensor, Tensor) -> Tensor",
    "schema signature: aten::conv2d.out(Tensor self)",
    "TypeError: forward() signature: (self, x)",
    "session_id: 3",
    "cookies: 3",
    "credentials: 3",
    "TypeError: got an unexpected keyword argument 'token'",
    "TypeError: got an unexpected keyword argument 'api_key'",
    "the password was wrong",
    "api key was rejected by the server",
    "KeyError: 'password'",
    "cannot load hf_checkpoint/model.safetensors",
    "No module named 'hf_transformers'",
    "'Foo' object has no attribute 'hf_pretrained_model'",
    "sk-learn-pipeline failed",
    "no such file: sk-model-7b-v2/config.json",
    "ghs_something_else, glrt-kernel_x, asianlanguages.bin",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "/data/runs/2026/experiment7/checkpoints/model/shard/part12",
    "basic layers2conv",
    "basic config=3",
    "https://github.com/org/repo.git@main",
    "s3://bucket/user@example.com/shard-3",
    "https://host:8080/user@example.com",
    "grad&scale=3, color#id=3",
    'File "/opt/token: x/train.py", line 3, in pass_token',
    "NCCL comm 0x7f88 commHash 0xabcdef0123456789 rank 3",
    "cannot open /site-packages/webhook/x.py",
)
