"""Proxmox VE beyond a shell: its HTTP API through proxmoxer, and the GPUs of a node.

    open_api(pct.api, …)  → Api                 one token at one cluster; nothing is contacted before the first call
        Api               get, rows, post, delete; every failure is a DfoError with what, why and fix
        rights            which privileges a token lacks, and the pveum commands that grant them
        tasks             a task (UPID) to its end
    Container(api, vmid)  node, status, config, start, node_facts
        snapshots         take one of our own and keep the newest of them
    gpu                   what is missing for GPUs in a container, as `pct set` lines; asks the node through ssh

The API cannot run programs or write files in a container, and a token may not set devices: both are for ssh.
Errors: ConnectError (`unreachable`, `connection_lost`, `certificate_untrusted`, `api_refused`), PreflightError
(`api_forbidden`, `api_failed`, `container_missing`, `cluster_not_ready`, `device_missing`), LockError, DeadlineError.
"""
