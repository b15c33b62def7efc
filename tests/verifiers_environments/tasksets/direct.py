# SPDX-License-Identifier: Apache-2.0
"""A harness without a program: it asks with OpenAI's client in the process of the environment."""

import verifiers.v1 as vf
from openai import AsyncOpenAI


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(
                model=ctx.model, messages=[{"role": "user", "content": data.prompt_text}]
            )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["DirectHarness"]
