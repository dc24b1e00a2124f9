"""`python -P mooncake_store.py MASTER NBYTES`: add memory to a Mooncake pool until the end of stdin.

It is run as a file, without importing lmcache-async, for a fast start.
"""

import sys

if __name__ == "__main__":
    from mooncake.store import MooncakeDistributedStore

    master, nbytes = sys.argv[1:]
    store = MooncakeDistributedStore()
    options = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": nbytes,
        "local_buffer_size": str(16 << 20),
        "master_server_addr": master,
    }
    if code := store.setup(options):
        sys.exit(f"the store cannot join the pool of {master}: code {code}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
