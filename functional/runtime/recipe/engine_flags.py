"""Flags of vLLM and of Dynamo, by kind: made from their own parsers by `ci/engine-flags.py`, not by hand."""

from functional.runtime.recipe.flags import Kind, by_name

VERSIONS = {"ai-dynamo": "1.3.0.post1", "vllm": "0.23.0"}
"""Versions of the packages whose parsers these are."""

ENGINE_FLAGS: dict[str, Kind] = by_name(
    bool="""
        allow_deprecated_quantization async_scheduling calculate_kv_scales cudagraph_metrics
        data_parallel_external_lb data_parallel_hybrid_lb disable_cascade_attn disable_chunked_mm_input
        disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization
        disable_sliding_window enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep
        enable_ep_weight_filter enable_eplb enable_expert_parallel enable_flashinfer_autotune
        enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details enable_lora
        enable_mamba_cache_stochastic_rounding enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
        enable_prefix_caching enable_prompt_embeds enable_return_routed_experts enable_sleep_mode
        enable_tower_connector_lora enforce_eager fail_on_environ_validation fully_sharded_loras
        interleave_mm_strings kv_cache_metrics kv_sharing_fast_prefill language_model_only mm_encoder_only
        numa_bind ray_workers_use_nsight scheduler_reserve_full_isl skip_mm_profiling skip_tokenizer_init
        specialize_active_lora trust_remote_code use_fp64_gumbel use_tqdm_on_load
    """,
    switch="""
        aggregate_engine_logging data_parallel_multi_port_external_lb disable_log_stats
    """,
    value="""
        additional_config all2all_backend allowed_local_media_path attention_backend attention_config block_size
        code_revision compilation_config config_format convert cp_kv_cache_interleave_size
        cpu_distributed_timeout_seconds cpu_offload_gb data_parallel_address data_parallel_backend
        data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local
        data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
        dcp_kv_cache_interleave_size decode_context_parallel_size default_mm_loras distributed_executor_backend
        distributed_timeout_seconds download_dir dtype ec_transfer_config eplb_config expert_placement_strategy
        gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path hf_overrides hf_token
        io_processor_plugin ir_op_priority kernel_config kv_cache_dtype kv_cache_memory_bytes
        kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_offloading_size kv_transfer_config
        limit_mm_per_prompt linear_backend load_format logprobs_mode long_prefill_token_threshold lora_dtype
        mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
        mamba_ssm_cache_dtype master_addr master_port max_cpu_loras max_cudagraph_capture_size max_logprobs
        max_long_partial_prefills max_lora_rank max_loras max_model_len max_num_batched_tokens
        max_num_partial_prefills max_num_seqs max_parallel_loading_workers media_io_kwargs
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
        mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
        mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_impl
        model_loader_extra_config moe_backend nnodes node_rank num_gpu_blocks_override offload_backend
        offload_group_size offload_num_in_group offload_prefetch_step optimization_level otlp_traces_endpoint
        override_attention_dtype override_generation_config performance_mode pipeline_parallel_size
        pooler_config prefill_context_parallel_size prefix_caching_hash_algo profiler_config
        pt_load_map_location quantization quantization_config reasoning_config reasoning_parser
        reasoning_parser_plugin renderer_num_workers revision runner safetensors_load_strategy
        safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls scheduling_policy seed
        show_hidden_metrics_for_version shutdown_timeout spec_method spec_model spec_tokens speculative_config
        stream_interval structured_outputs_config tensor_parallel_size tokenizer tokenizer_mode
        tokenizer_revision ubatch_size video_pruning_rate weight_transfer_config worker_cls worker_extension_cls
    """,
    list="""
        allowed_media_domains collect_detailed_traces cpu_offload_params cudagraph_capture_sizes ignore_patterns
        kv_cache_dtype_skip_layers logits_processors lora_target_modules numa_bind_cpus numa_bind_nodes
        offload_params served_model_name
    """,
)
"""Flags of vLLM's own parser."""

WORKER_FLAGS: dict[str, Kind] = by_name(
    bool="""
        durable_kv_events dyn_enable_structural_tag embedding_worker enable_multimodal enable_rl
        exclude_tools_when_tool_choice_none frontend_decoding gms_shadow_mode headless is_decode_worker
        is_prefill_worker multimodal_decode_worker multimodal_embedding_cache_publisher multimodal_encode_worker
        multimodal_worker route_to_encoder use_vllm_tokenizer
    """,
    switch="""
        version
    """,
    value="""
        benchmark_decode_batch_granularity benchmark_decode_length_granularity benchmark_mode
        benchmark_output_path benchmark_prefill_granularity benchmark_timeout benchmark_warmup_iterations
        custom_jinja_template disaggregation_mode discovery_backend dump_config_to dyn_endpoint_types
        dyn_reasoning_parser dyn_structural_tag_schema dyn_structural_tag_scope dyn_tool_call_parser
        embedding_transfer_mode endpoint endpoint_types engine_request_limit event_plane health_check_payload
        media_output_fs_url media_output_http_url mm_prompt_template model_express_url
        multimodal_embedding_cache_capacity_gb namespace request_plane
    """,
    list="""
        connector output_modalities
    """,
)
"""Flags `dynamo.vllm` adds to the engine's."""

FRONTEND_FLAGS: dict[str, Kind] = by_name(
    bool="""
        assume_kv_reuse durable_kv_events dyn_debug_perf enable_anthropic_api
        enable_streaming_reasoning_dispatch enable_streaming_tool_dispatch enforce_disagg
        exclude_tools_when_tool_choice_none interactive kserve_grpc_server kv_events load_aware
        router_assume_kv_reuse router_durable_kv_events router_kv_events router_replica_sync router_reset_states
        router_track_active_blocks router_track_output_blocks router_track_prefill_tokens serve_indexer
        strip_anthropic_preamble track_active_blocks track_output_blocks trust_remote_code use_remote_indexer
    """,
    switch="""
        version
    """,
    value="""
        active_decode_blocks_threshold active_prefill_tokens_threshold active_prefill_tokens_threshold_frac
        admission_control aic_attention_dp_size aic_backend aic_backend_version aic_model_path aic_moe_ep_size
        aic_moe_tp_size aic_mtp_seed aic_nextn aic_nextn_accept_rates aic_system aic_tp_size discovery_backend
        dump_config_to dyn_chat_processor dyn_preprocess_workers event_plane grpc_metrics_port http_host
        http_port kv_cache_block_size kv_overlap_score_weight metrics_prefix migration_limit
        migration_max_seq_len model_name model_path namespace namespace_prefix request_plane
        router_disk_cache_hit_weight router_event_threads router_host_cache_hit_weight
        router_kv_overlap_score_credit router_kv_overlap_score_credit_decay router_kv_overlap_score_weight
        router_min_initial_workers router_mode router_policy_config router_predicted_ttl_secs
        router_prefill_load_model router_prefill_load_scale router_queue_policy router_queue_threshold
        router_session_affinity_ttl_secs router_snapshot_threshold router_temperature router_ttl_secs
        shared_cache_multiplier shared_cache_type tls_cert_path tls_key_path tokenizer
    """,
)
"""Flags of `dynamo.frontend`."""
