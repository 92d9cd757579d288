"""Ray with two engines of the embedded model, as a program: prints where it listens, then does what it is told.

    python ray_cluster.py FOLDER        # then, on its standard input: kill REPLICA

It ends, and so does all that it started, when its standard input does.
"""

from __future__ import annotations

import socket
import sys

import ray
import ray.serve._private.api
from ray import serve

from diffusers_continuous.serving.ray_app import app

# A busy machine takes its time.
PROXY_TIMEOUT_S = 300
MAX_STARTS = 3


def start_ray(folder: str) -> None:
    """Ray gives its own parts half a minute to start, and no more, which a busy machine may not keep the first time."""
    for attempt in range(MAX_STARTS):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 * 2**20,
                _temp_dir=f"{folder}/{attempt}",
            )
            return
        except Exception:
            ray.shutdown()
            if attempt == MAX_STARTS - 1:
                raise


def main(folder: str) -> None:
    ray.serve._private.api.HTTP_PROXY_TIMEOUT = PROXY_TIMEOUT_S
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start_ray(folder)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"min_replicas": "2", "cpus_per_replica": "0", "max_size": "256", "max_steps": "400"}
    options |= {"media_dir": f"{folder}/media", "metrics_prefix": "vllm_omni"}
    serve.run(app(options), name="pictures")
    print(f"> http://127.0.0.1:{port}", flush=True)
    for line in sys.stdin:
        replica = line.split()[1]
        (name,) = (
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["name"].endswith(f"#{replica}")
        )
        ray.kill(ray.get_actor(name, namespace="serve"))
        print("> killed", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
