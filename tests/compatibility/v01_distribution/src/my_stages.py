from lmcache_async.pipeline.batch import FilledBatch
from lmcache_async.pipeline.chain import Chain


async def count_tokens(batch: FilledBatch) -> FilledBatch:
    count_tokens.total += sum(len(chunk.tokens) for chunk in batch.chunks)
    return batch


count_tokens.total = 0
