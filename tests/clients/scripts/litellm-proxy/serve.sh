export LITELLM_MASTER_KEY=sk-choose-a-long-one-7f3a91

exec litellm --config config.yaml --port 8181
