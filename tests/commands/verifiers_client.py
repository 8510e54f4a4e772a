"""Run by verifiers' own interpreter: its training client asks a server for one answer, which is printed as JSON.

python verifiers_client.py URL MODEL POLICY, the key in the variable KEY.
"""

import asyncio
import json
import sys

from renderers.configs import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.types import SamplingConfig

url, model, policy = sys.argv[1:]
given = {"renderer": DefaultRendererConfig(), "renderer_model_name": policy}
client = TrainClient(TrainClientConfig(base_url=url, api_key_var="KEY", **given))
body = {"model": model, "messages": [{"role": "user", "content": "A knight says: we are both knaves."}]}
sampling = SamplingConfig(temperature=0.9, max_tokens=12, seed=3)
found = asyncio.run(client.get_response(ChatDialect(), body, sampling))
tokens = found.tokens
print(json.dumps([tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs, found.message.content]))
