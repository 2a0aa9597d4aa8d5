"""Names for `vulture` (never run): code whose use it cannot see, and the reason why each stays."""

# attributes and hooks that libraries read
do_sample, top_k, top_p, decoder_start_token_id, cache_implementation, _compile_all_devices  # transformers' generation
self_attention_cache, cross_attention_cache, is_updated, get_seq_length  # methods of a cache that T5's attention calls
pre_tokenizer, post_processor  # tokenizers' pipeline
_rootpath, benchmark_quiet  # pytest's root folder, an option of pytest-benchmark
mode, ignored, cache_hook, types, axis  # parameters that a library's interface passes
_device, tokenizer_name, loglikelihood_rolling, generate_until, set_cache_hook, get_model_info  # lm-eval's model
load_task_splits, generate_world_splits, add_boxed_answers  # named in tasks' YAML
compute_world_code_metrics, compute_humaneval_metrics  # also named in tasks' YAML
__getattr__, __dir__  # lazy names of the package
custom_generate  # of an exit: docs/screen.md
take_profile, choose_margin  # also lazy names, for users: docs/python.md
plot_profile, plot_depth_by_position, plot_explorer, plot_cost_against_quality  # also lazy: docs/results.ipynb
_repr_html_  # display of an object in a notebook
fit_translators, attach_translators, decode_losses  # also lazy: docs/lens.md
features_of_windows  # docs/screen.md
state_translators_to_tensors, state_translators_from_tensors  # for files that contain translators and other content
emad_accuracy  # a fixture of users' suites: docs/accuracy.md
shallow_point  # requested by name in suites/fidelity
row_kv  # K and V of a row, which laws compare and mutants change
length_and_cap_are_those_of_the_history, what_was_returned_stays, teardown, ask_again  # Hypothesis's state machine
explorers, pair_texts  # the page's template
because  # of a constraint: its reason, for readers
persistent_id, persistent_load  # methods that pickle calls

# for readers of a result, or of the papers
process_seconds  # of a timing, with the wall clock: benchmarks read it
canonical_solution, exit_code, mean_loss  # parts of records that people look at
describe_difference, model_by_token  # what laws print of two works, and hold against each switched text
corrected  # of an estimator against the full softmax: whether a linear map was applied
changed_share, detect_drift  # the second bounded loss and the drift test: docs/guarantee.md
cluster_near_duplicates  # a document index's result for many texts, read by tests
features_of_record  # for records of a user's own decoder: docs/guarantee.md
catch_up_tokens_by_model, count_catch_up_tokens  # of one switched text: laws compare many texts with it
