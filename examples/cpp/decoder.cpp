// A decoder of adaptive depth in plain C++17, judged over a byte stream by pytest-emad.
//
// It speaks the wire protocol (docs/wire.md) on standard input and output, reads GPT-NeoX models in the format of
// transformers (config.json, model.safetensors in float32), and knows the monotone schedule with entropy probes:
//
//     hidden = embed(token)
//     for layer = 1 … cap:                    cap: the depth of the row's last token; the ceiling for a fresh row
//         hidden = block(layer, hidden)
//         at a probe: exit where the entropy of softmax(head(norm(hidden))) ≤ the probe's threshold
//     emit head(norm(hidden)); cap = layer
//
// Depth never rises, so every layer that a token runs holds K and V of all tokens before it, and nothing is ever owed.
// Rows are processed one after the other, each with K and V of its own: no row can depend on its neighbours.
// wire.hpp has refusals, JSON and frames. From the top: weights, the model, rows and the rule, generation, the calls.

#include "wire.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <set>

// ----------------------------------------------------------------------------------------------------------- weights

struct Affine {
    Floats weight, bias;  // a norm's: [hidden] both; a linear map's: [out, in], and [out] or none
};

struct Layer {
    Affine before_attention, before_mlp, qkv, dense, up, down;
};

struct Model {
    Int hidden, heads, inner, vocabulary, positions, width, rotary;  // width: of one head; its first `rotary` turn
    bool parallel;                                                   // attention and MLP side by side
    double epsilon;
    Floats embedding, cosine, sine;  // [vocabulary, hidden]; [positions, rotary / 2]
    std::vector<Layer> layers;
    Affine last, head;
};

string contents(const string& path) {
    std::ifstream file(path, std::ios::binary);
    require(file.good(), "folder", path, "a file that can be read (of shards, make one file)");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::shared_ptr<const Model> load(const string& folder) {
    const Json config(contents(folder + "/config.json"));
    const string rope = "rope_parameters";  // before transformers 5 both numbers stood in the config itself
    const string type = config.text("model_type", "none"), scaling = config.text(rope + "/rope_type", "default");
    support(type == "gpt_neox", "model_type " + type + ": this decoder knows GPT-NeoX alone");
    support(config.text("hidden_act", "gelu") == "gelu", "hidden_act: this decoder knows the exact gelu alone");
    support(config.flag("attention_bias", true), "attention without bias");
    support(!config.flag("tie_word_embeddings", false), "heads that are the embedding");
    support(!config.has("rope_scaling") && scaling == "default", "scaled rotary positions");
    const auto size = [&](const char* key) {
        require(config.whole(key) > 0 && config.whole(key) < 1 << 30, key, to_string(config.whole(key)), "a size");
        return config.whole(key);
    };
    auto model = std::make_shared<Model>();
    Model& m = *model;
    m.hidden = size("hidden_size"), m.heads = size("num_attention_heads"), m.inner = size("intermediate_size");
    m.vocabulary = size("vocab_size"), m.positions = size("max_position_embeddings"), m.width = m.hidden / m.heads;
    m.parallel = config.flag("use_parallel_residual", true), m.epsilon = config.number("layer_norm_eps", 1e-5);
    const double older = config.has(rope) ? 1 : config.number("rotary_pct", 0.25);
    const double share = config.number(rope + "/partial_rotary_factor", older);
    const double base = config.number(rope + "/rope_theta", config.number("rotary_emb_base", 10000));
    m.rotary = static_cast<Int>(static_cast<double>(m.width) * share);
    const bool even = m.width * m.heads == m.hidden && m.rotary % 2 == 0 && m.rotary >= 0 && m.rotary <= m.width;
    require(even, "num_attention_heads", to_string(m.heads), "heads of one width, an even number of it rotary");
    for (Int position = 0; position < m.positions; ++position)
        for (Int i = 0; i < m.rotary; i += 2) {  // in float32 step by step: far out, float64 gives another angle
            const float power = static_cast<float>(i) / static_cast<float>(m.rotary);
            const float angle = static_cast<float>(position) * (1 / std::pow(static_cast<float>(base), power));
            m.cosine.push_back(std::cos(angle)), m.sine.push_back(std::sin(angle));
        }

    // safetensors: eight bytes of length, a JSON header {name: {dtype, shape, data_offsets}}, the data
    const string path = folder + "/model.safetensors", file = contents(path);
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), std::min<size_t>(file.size(), 8));
    require(length > 0 && file.size() > 8 && length <= file.size() - 8, "folder", path, "a safetensors file");
    const Json header(file.substr(8, length));
    const char *data = file.data() + 8 + length, *end = file.data() + file.size();
    const auto tensor = [&](const string& name, const Ints& shape) {
        require(header.text(name + "/dtype") == "F32", name, header.text(name + "/dtype"), "F32");
        require(header.wholes(name + "/shape") == shape, name, "of another shape", "what config.json implies");
        Int bytes = sizeof(float);
        for (const Int wanted : shape) bytes *= wanted;
        const Int from = header.whole(name + "/data_offsets/0"), to = header.whole(name + "/data_offsets/1");
        require(from >= 0 && to <= end - data && to - from == bytes, name, "elsewhere", "4 bytes per element");
        Floats values(bytes / sizeof(float));
        std::memcpy(values.data(), data + from, bytes);
        return values;
    };
    const auto affine = [&](const string& name, const Ints& shape) {
        return Affine{tensor(name + ".weight", shape), tensor(name + ".bias", {shape[0]})};
    };
    for (Int i = 0; i < size("num_hidden_layers"); ++i) {
        const string at = "gpt_neox.layers." + to_string(i) + ".", attention = at + "attention.", mlp = at + "mlp.";
        m.layers.push_back({affine(at + "input_layernorm", {m.hidden}),
                            affine(at + "post_attention_layernorm", {m.hidden}),
                            affine(attention + "query_key_value", {3 * m.hidden, m.hidden}),
                            affine(attention + "dense", {m.hidden, m.hidden}),
                            affine(mlp + "dense_h_to_4h", {m.inner, m.hidden}),
                            affine(mlp + "dense_4h_to_h", {m.hidden, m.inner})});
    }
    m.embedding = tensor("gpt_neox.embed_in.weight", {m.vocabulary, m.hidden});
    m.last = affine("gpt_neox.final_layer_norm", {m.hidden});
    m.head = {tensor("embed_out.weight", {m.vocabulary, m.hidden}), {}};
    return model;
}

// --------------------------------------------------------------------------------------------------------- the model

float dot(const float* a, const float* b, Int n) {
    float lanes[16] = {}, sum = 0;  // side by side they fit vector registers, and short sums round less than a long one
    Int i = 0;
    for (; i + 16 <= n; i += 16)
        for (Int lane = 0; lane < 16; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
    for (; i < n; ++i) sum += a[i] * b[i];
    for (const float lane : lanes) sum += lane;
    return sum;
}

Floats linear(const Affine& map, const Floats& x, Int in) {  // [n, in] → [n, out]
    const Int n = len(x) / in, out = len(map.weight) / in;
    Floats y(n * out);
    for (Int o = 0; o < out; ++o)
        for (Int t = 0; t < n; ++t)
            y[t * out + o] = dot(&map.weight[o * in], &x[t * in], in) + (map.bias.empty() ? 0 : map.bias[o]);
    return y;
}

Floats normed(const Affine& norm, Floats x, double epsilon) {  // [n, hidden]
    const Int hidden = len(norm.weight);
    for (float* row = x.data(); row < x.data() + x.size(); row += hidden) {
        double mean = 0, variance = 0;
        for (Int i = 0; i < hidden; ++i) mean += row[i] / static_cast<double>(hidden);
        for (Int i = 0; i < hidden; ++i) variance += (row[i] - mean) * (row[i] - mean) / static_cast<double>(hidden);
        const double scale = 1 / std::sqrt(variance + epsilon);
        for (Int i = 0; i < hidden; ++i)
            row[i] = static_cast<float>((row[i] - mean) * scale) * norm.weight[i] + norm.bias[i];
    }
    return x;
}

struct Cache {  // of one row in one layer
    Floats keys, values;  // [positions held, hidden]
};

void rotate(const Model& m, float* head, Int position) {
    const Int half = m.rotary / 2;
    for (Int i = 0; i < half; ++i) {
        const float cosine = m.cosine[position * half + i], sine = m.sine[position * half + i];
        const float first = head[i], second = head[i + half];
        head[i] = first * cosine - second * sine;
        head[i + half] = second * cosine + first * sine;
    }
}

// Attention of n new positions, `x` [n, hidden], over those held and themselves. Keys after a query are scored and then
// masked; so they are counted: n queries × all keys.
Floats attend(const Model& m, const Layer& layer, Cache& cache, const Floats& x) {
    const Int held = len(cache.keys) / m.hidden, n = len(x) / m.hidden, keys = held + n;
    Floats qkv = linear(layer.qkv, x, m.hidden);  // [n, heads, 3, width]
    cache.keys.resize(keys * m.hidden), cache.values.resize(keys * m.hidden);
    for (Int i = 0; i < n * m.heads; ++i) {
        float *query = &qkv[i * 3 * m.width], *key = query + m.width, *value = key + m.width;
        rotate(m, query, held + i / m.heads), rotate(m, key, held + i / m.heads);
        std::copy(key, key + m.width, &cache.keys[held * m.hidden + i * m.width]);
        std::copy(value, value + m.width, &cache.values[held * m.hidden + i * m.width]);
    }
    Floats mixed(n * m.hidden), weights(keys);
    const float scale = 1 / std::sqrt(static_cast<float>(m.width));
    for (Int i = 0; i < n * m.heads; ++i) {
        const Int last = held + i / m.heads, head = i % m.heads * m.width;
        for (Int k = 0; k < keys; ++k)
            weights[k] = dot(&qkv[i * 3 * m.width], &cache.keys[k * m.hidden + head], m.width) * scale;
        for (Int k = last + 1; k < keys; ++k) weights[k] = -INFINITY;
        const float most = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        for (float& weight : weights) sum += weight = std::exp(weight - most);
        for (Int k = 0; k < keys; ++k) {
            const float share = static_cast<float>(weights[k] / sum);
            const float* value = &cache.values[k * m.hidden + head];
            for (Int j = 0; j < m.width; ++j) mixed[i * m.width + j] += share * value[j];
        }
    }
    return linear(layer.dense, mixed, m.hidden);
}

void add(Floats& to, const Floats& from) {
    for (Int i = 0; i < len(to); ++i) to[i] += from[i];
}

// One block over the states [n, hidden] of the row's next n positions, in place.
void block(const Model& m, const Layer& layer, Cache& cache, Floats& hidden) {
    const Floats attended = attend(m, layer, cache, normed(layer.before_attention, hidden, m.epsilon));
    if (!m.parallel) add(hidden, attended);
    Floats inner = linear(layer.up, normed(layer.before_mlp, hidden, m.epsilon), m.hidden);
    for (float& x : inner) x *= 0.5f * (1 + std::erf(x * 0.70710678f));  // the exact GELU
    add(hidden, linear(layer.down, inner, m.inner));
    if (m.parallel) add(hidden, attended);
}

Floats readout(const Model& m, const Floats& hidden) {  // [hidden] → logits [vocabulary]
    Floats logits = linear(m.head, normed(m.last, hidden, m.epsilon), m.hidden);
    for (const float logit : logits)
        if (!std::isfinite(logit)) throw Refusal{"Failure", "logits that are not finite"};
    return logits;
}

double entropy_nats(const Floats& logits) {  // log Z − Σ p z, z counted from its maximum
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0, weighted = 0;
    for (const float logit : logits) {
        const double weight = std::exp(logit - most);
        sum += weight, weighted += weight * (logit - most);
    }
    return std::log(sum) - weighted / sum;
}

// -------------------------------------------------------------------------------------------------- rows and the rule

struct Work {  // executed, per layer (emad_ref.record.Work); of readouts there is one kind here, the full head
    Ints tokens, context, readouts;

    explicit Work(Int layers) : tokens(layers), context(layers), readouts(layers) {}

    void write(Reply& reply, const string& name) const {
        const Int L = len(tokens);
        Ints heads = readouts;
        heads.resize(5 * L);  // the other kinds
        reply.array(name + ".tokens", {L}, tokens).array(name + ".context", {L}, context);
        reply.array(name + ".readout_rows", {5, L}, heads).array(name + ".readout_macs", {5, L}, Ints(5 * L));
        reply.array(name + ".fills", {2, L}, Ints(2 * L));
        reply.array(name + ".cross_fills", {L}, Ints(L)).array(name + ".cross_context", {L}, Ints(L));
    }
};

struct Row {
    std::vector<Cache> layers;
    Ints caps;          // caps[p]: the largest depth of position p; one more than there are tokens
    Int committed = 1;  // the least length that a rollback may ask for

    Int length() const { return len(caps) - 1; }
};

struct Said {  // of one token
    Floats logits;
    Int depth;
    Doubles signal;
};

struct Decoder {
    std::shared_ptr<const Model> model;
    Int layers, ceiling, max_rows, seed;
    double temperature;
    Ints probes;
    Floats thresholds;  // float32, as the entropies that they are compared with

    void run(Row& row, Int layer, Floats& hidden, Work& work) const {  // layers count from 1
        Cache& cache = row.layers[layer - 1];
        block(*model, model->layers[layer - 1], cache, hidden);
        work.tokens[layer - 1] += len(hidden) / model->hidden;
        work.context[layer - 1] += len(hidden) / model->hidden * (len(cache.keys) / model->hidden);
    }
    Row prefill(const Ints& prompt, Work& work) const {  // all but its last position, in one piece at the ceiling
        Row row{std::vector<Cache>(layers), Ints(prompt.size(), ceiling)};
        Floats hidden;
        for (Int at = 0; at < row.length(); ++at) embed(prompt[at], hidden);
        for (Int layer = 1; layer <= ceiling && row.length() > 0; ++layer) run(row, layer, hidden, work);
        return row;
    }
    void embed(Int token, Floats& hidden) const {
        const float* row = &model->embedding[token * model->hidden];
        hidden.insert(hidden.end(), row, row + model->hidden);
    }
    // One token, at depth `forced` or where that is 0 at the rule's; `wanted`: whether its logits will be shown.
    Said step(Row& row, Int token, Int forced, bool wanted, Work& work) const {
        Said said{{}, forced ? forced : row.caps.back(), Doubles(probes.size(), NAN)};
        Floats hidden;
        embed(token, hidden);
        Int probe = 0, read = 0;  // read: the layer of the logits at hand; an exit at a probe emits what the probe read
        const auto look = [&](Int layer) {
            said.logits = readout(*model, hidden);
            ++work.readouts[layer - 1];
            read = layer;
        };
        for (Int layer = 1; layer <= said.depth; ++layer) {
            run(row, layer, hidden, work);
            if (forced || probe == len(probes) || probes[probe] != layer) continue;
            look(layer);
            said.signal[probe] = entropy_nats(said.logits);
            if (static_cast<float>(said.signal[probe]) <= thresholds[probe]) said.depth = layer;
            ++probe;
        }
        if (wanted && read != said.depth) look(said.depth);
        row.caps.push_back(said.depth);
        return said;
    }
    void rollback(Row& row, Int length) const {
        row.caps.resize(length + 1);
        for (Cache& cache : row.layers)
            for (Floats* held : {&cache.keys, &cache.values})
                held->resize(std::min(len(*held), length * model->hidden));
    }
    // No token from `length` on can run deeper than the cap there, whatever is rolled back: K and V above it may go.
    void commit(Row& row, Int length) const {
        row.committed = length;
        for (Int layer = row.caps[length] + 1; layer <= layers; ++layer) row.layers[layer - 1] = Cache{};
    }
    Int pick(const Floats& logits, std::mt19937_64& random) const {  // the argmax, or of softmax(logits / temperature)
        const auto best = std::max_element(logits.begin(), logits.end());
        if (temperature == 0) return best - logits.begin();
        Doubles upto;
        double sum = 0;
        for (const float logit : logits) upto.push_back(sum += std::exp((double{logit} - *best) / temperature));
        const double drawn = static_cast<double>(random() >> 11) * 0x1p-53 * sum;
        return std::min(std::upper_bound(upto.begin(), upto.end(), drawn), upto.end() - 1) - upto.begin();
    }
};

// -------------------------------------------------------------------------------------------------------- generation

void generate(const Decoder& decoder, const std::vector<Ints>& prompts, Int max_new, const Ints& stop, Reply& reply) {
    const char* const NAMES[] = {"sequence", "position", "token", "depth", "cap", "phase", "model", "kept"};
    const Int PROMPT = 0, DECODE = 1, MODEL = 0, KEPT = 1, probes = len(decoder.probes), ceiling = decoder.ceiling;
    Ints columns[8], emitted, lengths;
    Doubles signal;
    string reasons;
    Work prompt_work(decoder.layers), work = prompt_work;
    const auto log = [&](const Ints& values, const Doubles& read) {
        for (Int i = 0; i < 8; ++i) columns[i].push_back(values[i]);
        signal.insert(signal.end(), read.begin(), read.end());
    };
    for (Int sequence = 0; sequence < len(prompts); ++sequence) {
        const Ints& prompt = prompts[sequence];
        Row row = decoder.prefill(prompt, prompt_work);
        for (Int at = 0; at < row.length(); ++at)
            log({sequence, at, prompt[at], ceiling, ceiling, PROMPT, MODEL, KEPT}, Doubles(probes, NAN));
        std::seed_seq seeds{decoder.seed & 0xFFFFFFFF, decoder.seed >> 32, sequence};
        std::mt19937_64 random(seeds);  // one per row: draws do not depend on neighbours
        Int token = prompt.back(), count = 0;
        bool stopped = false;
        for (; count < max_new && !stopped; ++count) {
            const Int at = row.length(), cap = row.caps.back();
            const Said said = decoder.step(row, token, 0, true, work);
            log({sequence, at, token, said.depth, cap, DECODE, MODEL, KEPT}, said.signal);
            decoder.commit(row, row.length());
            emitted.push_back(token = decoder.pick(said.logits, random));
            stopped = std::find(stop.begin(), stop.end(), token) != stop.end();
        }
        lengths.push_back(count);
        reasons += (sequence ? ", " : "") + quoted(stopped ? "stop token" : "length");
    }
    for (Int i = 0; i < decoder.layers; ++i)  // of readouts prompts have none
        work.tokens[i] += prompt_work.tokens[i], work.context[i] += prompt_work.context[i];
    for (Int i = 0; i < 8; ++i) reply.array(string("token.") + NAMES[i], {len(columns[i])}, columns[i]);
    reply.array("signal", {len(columns[0]), probes}, signal).field("stop", "[" + reasons + "]");
    reply.array("emitted", {len(emitted)}, emitted).array("emitted_lengths", {len(lengths)}, lengths);
    work.write(reply, "work");
    prompt_work.write(reply, "prompt_work");
}

// --------------------------------------------------------------------------------------------------------- the calls

constexpr Int MAX_FEED = 8;

struct Session {
    Int owner;
    std::shared_ptr<const Decoder> decoder;
    Work work;
    std::vector<Row> rows;

    void write(Reply& reply) const {
        Ints length, cap;
        for (const Row& row : rows) length.push_back(row.length()), cap.push_back(row.caps.back());
        reply.array("length", {len(rows)}, length).array("cap", {len(rows)}, cap);
        work.write(reply, "work");
    }
    // Feeds `tokens` [rows, n] at `depth` [rows, n], or where that is empty at the rule's, and writes STATE and STEP.
    void advance(const Ints& tokens, const Ints& depth, Int n, Int last, Reply& reply) {
        Floats logits;
        Ints depths;
        Doubles signal;
        for (Int i = 0; i < len(tokens); ++i) {
            const bool wanted = i % n >= n - last;
            const Said said = decoder->step(rows[i / n], tokens[i], depth.empty() ? 0 : depth[i], wanted, work);
            if (wanted) logits.insert(logits.end(), said.logits.begin(), said.logits.end());
            depths.push_back(said.depth);
            signal.insert(signal.end(), said.signal.begin(), said.signal.end());
        }
        write(reply);
        reply.array("logits", {len(rows), last, decoder->model->vocabulary}, logits);
        reply.array("depth", {len(rows), n}, depths).array("signal", {len(rows), n, len(decoder->probes)}, signal);
    }
};

void require_served(const Model& model, const Ints& tokens, Int positions) {
    for (const Int token : tokens)
        require(token >= 0 && token < model.vocabulary, "tokens", to_string(token), "ids of the model");
    require(positions <= model.positions, "positions", to_string(positions), "no more than the model's");
}

std::vector<Ints> prompts_of(const Request& request, const Decoder& decoder, Int more) {
    support(!request.has("source"), "prompts with a source: this decoder has no encoder");
    const Ints &tokens = request.ints("tokens", {-1}), &lengths = request.ints("lengths", {-1});
    require(!lengths.empty() && len(lengths) <= decoder.max_rows, "prompts", to_string(len(lengths)), "1 to max_rows");
    std::vector<Ints> rows;
    auto from = tokens.begin();
    for (const Int length : lengths) {
        require(length >= 1 && length <= tokens.end() - from, "lengths", to_string(length), "≥ 1, in all the tokens");
        rows.emplace_back(from, from + length);
        require_served(*decoder.model, rows.back(), length + more);
        from += length;
    }
    require(from == tokens.end(), "lengths", "too few", "lengths that add up to the tokens");
    return rows;
}

class Server {
  public:
    bool answer(const Request& request) {  // false after `bye`
        static const std::map<string, void (Server::*)(const Request&, Reply&)> CALLS = {
            {"hello", &Server::hello},       {"open", &Server::open},     {"start", &Server::start},
            {"feed", &Server::feed},         {"deepen", &Server::deepen}, {"rollback", &Server::rollback},
            {"commit", &Server::commit},     {"drop", &Server::drop},     {"end", &Server::end},
            {"generate", &Server::generate}, {"close", &Server::close},   {"synchronize", &Server::synchronize},
            {"bye", &Server::bye},
        };
        const string& call = request.header.text("call");
        require(CALLS.count(call) > 0, "call", call, "a call of version 1");
        Reply reply("reply", call);
        (this->*CALLS.at(call))(request, reply);
        reply.send();
        return call != "bye";
    }

  private:
    std::map<string, std::shared_ptr<const Model>> models_;  // read once, shared by all decoders
    std::map<Int, std::shared_ptr<const Decoder>> decoders_;
    std::map<Int, Session> sessions_;
    Int ids_ = 0;

    template <class T>
    static T& named(std::map<Int, T>& open, const Request& request, const char* name) {
        const auto found = open.find(request.header.whole(name));
        require(found != open.end(), name, to_string(request.header.whole(name)), "the id of an open one");
        return found->second;
    }
    void hello(const Request& request, Reply& reply) {
        support(request.header.whole("wire") == 1, "versions of the protocol other than 1");
        reply.field("wire", "1").field("name", quoted("plain C++17"));
    }
    void open(const Request& request, Reply& reply) {
        const Json& asked = request.header;
        const auto only = [&](const string& path, const string& wanted, const string& why) {
            support(asked.text(path) == wanted, path + " " + asked.text(path) + ": " + why);
        };
        only("model/dtype", "float32", "this decoder computes in float32");
        only("point/schedule", "monotone", "this decoder only lowers depth");
        only("point/signal", "entropy_nats", "this decoder knows entropy alone");
        only("point/estimator/kind", "full", "this decoder reads the full softmax");
        support(asked.size("point/bins/features") == 0, "bins: this decoder has one threshold per probe");
        support(!asked.flag("point/interpolate", false), "interpolation: this decoder leaves at probes alone");
        support(!asked.has("point/confidence") && !asked.has("point/decay"), "parameters of other signals");
        support(!asked.has("point/lens"), "a tuned lens: this decoder reads by the model's own head");
        const string folder = asked.text("model/folder"), key = folder + "\n" + asked.text("model/fingerprint");
        if (!models_.count(key)) models_[key] = load(folder);
        Decoder made{models_[key], asked.whole("point/layers"), asked.whole("point/ceiling"), asked.whole("max_rows"),
                     asked.whole("seed"), asked.number("temperature"), asked.wholes("point/probes"), {}};
        require(made.layers == len(made.model->layers), "layers", to_string(made.layers), "the model's");
        require(made.ceiling >= 1 && made.ceiling <= made.layers, "ceiling", to_string(made.ceiling), "a layer");
        require(made.temperature >= 0, "temperature", to_string(made.temperature), "a number ≥ 0");
        const string bin = "point/thresholds/0";
        require(asked.size(bin) == len(made.probes), "thresholds", to_string(asked.size(bin)), "one per probe");
        for (Int i = 0; i < len(made.probes); ++i) {
            const Int probe = made.probes[i], before = i ? made.probes[i - 1] : 0;
            require(probe > before && probe < made.ceiling, "probes", to_string(probe), "ascending, below the ceiling");
            made.thresholds.push_back(static_cast<float>(asked.number_or_infinity(bin + "/" + to_string(i))));
        }
        decoders_[++ids_] = std::make_shared<const Decoder>(std::move(made));
        reply.field("decoder", to_string(ids_));
        reply.field("capabilities", "{\"max_feed\": " + to_string(MAX_FEED) + ", \"schedules\": [\"monotone\"], "
                                    "\"counted\": true, \"logit_noise\": 0.0, \"deepens\": false}");
    }
    void start(const Request& request, Reply& reply) {
        const auto& decoder = named(decoders_, request, "decoder");
        Session session{request.header.whole("decoder"), decoder, Work(decoder->layers), {}};
        Ints last;
        for (const Ints& prompt : prompts_of(request, *decoder, 0)) {
            session.rows.push_back(decoder->prefill(prompt, session.work));
            last.push_back(prompt.back());
        }
        session.advance(last, {}, 1, 1, reply);
        sessions_.emplace(++ids_, std::move(session));
        reply.field("session", to_string(ids_));
    }
    void feed(const Request& request, Reply& reply) {
        Session& session = named(sessions_, request, "session");
        const Int rows = len(session.rows);
        const Ints &tokens = request.ints("tokens", {rows, -1}), none;
        const Int n = len(tokens) / rows, last = request.header.has("last") ? request.header.whole("last") : n;
        const Ints& depth = request.has("depth") ? request.ints("depth", {rows, n}) : none;
        require(n >= 1 && n <= MAX_FEED, "tokens", to_string(n) + " per row", "1 to " + to_string(MAX_FEED));
        require(last >= 0 && last <= n, "last", to_string(last), "a count of the tokens fed");
        for (const Row& row : session.rows) require_served(*session.decoder->model, tokens, row.length() + n);
        for (Int i = 0; i < len(depth); ++i) {  // of all rows, before anything changes
            const Int cap = i % n ? depth[i - 1] : session.rows[i / n].caps.back();
            const string said = "depth=" + to_string(depth[i]) + " in row " + to_string(i / n) + ", but expected 1 to ";
            if (depth[i] < 1 || depth[i] > cap) throw Refusal{"InadmissibleDepth", said + to_string(cap)};
        }
        session.advance(tokens, depth, n, last, reply);
    }
    void deepen(const Request&, Reply&) { support(false, "deepen: this decoder only lowers depth"); }
    void rollback(const Request& request, Reply& reply) { settle(request, reply, &Decoder::rollback); }
    void commit(const Request& request, Reply& reply) { settle(request, reply, &Decoder::commit); }
    void settle(const Request& request, Reply& reply, void (Decoder::*change)(Row&, Int) const) {
        Session& session = named(sessions_, request, "session");
        const Ints& length = request.ints("length", {len(session.rows)});
        for (Int i = 0; i < len(length); ++i)
            require(length[i] >= session.rows[i].committed && length[i] <= session.rows[i].length(), "length",
                    to_string(length[i]), "at least what was committed, at most what is held");
        for (Int i = 0; i < len(length); ++i) ((*session.decoder).*change)(session.rows[i], length[i]);
        session.write(reply);
    }
    void drop(const Request& request, Reply& reply) {
        Session& session = named(sessions_, request, "session");
        const Ints& listed = request.ints("rows", {-1});
        const std::set<Int> gone(listed.begin(), listed.end());  // each once, in order
        const bool present = gone.empty() || (*gone.begin() >= 0 && *gone.rbegin() < len(session.rows));
        require(present && len(gone) < len(session.rows), "rows", "others", "indices of some, not all, of the rows");
        for (auto row = gone.rbegin(); row != gone.rend(); ++row) session.rows.erase(session.rows.begin() + *row);
        session.write(reply);
    }
    void end(const Request& request, Reply&) {
        named(sessions_, request, "session");
        sessions_.erase(request.header.whole("session"));
    }
    void generate(const Request& request, Reply& reply) {
        const Decoder& decoder = *named(decoders_, request, "decoder");
        const Int max_new = request.header.whole("max_new");
        require(max_new >= 1, "max_new", to_string(max_new), "at least one new token");
        const std::vector<Ints> prompts = prompts_of(request, decoder, max_new - 1);
        ::generate(decoder, prompts, max_new, request.header.wholes("stop"), reply);
    }
    void synchronize(const Request& request, Reply&) { named(decoders_, request, "decoder"); }
    void close(const Request& request, Reply&) {
        named(decoders_, request, "decoder");
        const Int id = request.header.whole("decoder");
        for (auto at = sessions_.begin(); at != sessions_.end();)
            at = at->second.owner == id ? sessions_.erase(at) : std::next(at);
        decoders_.erase(id);
    }
    void bye(const Request&, Reply&) {}
};

int main() {
    const std::uint16_t one = 1;
    survive(*reinterpret_cast<const unsigned char*>(&one) == 1, "a big-endian machine: frames and weights are not");
    Server server;
    string header, payload;
    while (read_frame(header, payload)) {
        try {
            if (!server.answer(Request(header, payload))) return 0;
        } catch (const Refusal& refusal) {
            Reply("error", refusal.kind).field("message", quoted(refusal.message)).send();
        } catch (const std::exception& error) {
            Reply("error", "Failure").field("message", quoted(error.what())).send();
        }
    }
    return 0;
}
