// The wire protocol (docs/wire.md) as a decoder sees it: refusals, JSON, frames. Standard library only.
//
//     EMW1 | header bytes, uint32 | payload bytes, uint64 | header, JSON | payload, arrays one after the other
//
// Little-endian, as the machine is required to be.

#ifndef EMAD_WIRE_HPP
#define EMAD_WIRE_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

using Int = std::int64_t;
using Ints = std::vector<Int>;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using std::string;
using std::to_string;

template <class Many>
Int len(const Many& many) {
    return static_cast<Int>(many.size());
}

struct Refusal {  // becomes the reply {"error": kind, "message": message}
    string kind, message;
};

inline void require(bool holds, const string& name, const string& value, const string& expected) {
    if (!holds) throw Refusal{"BadArgument", name + "=" + value + ", but expected " + expected};
}

inline void support(bool holds, const string& what) {
    if (!holds) throw Refusal{"Unsupported", what};
}

// -------------------------------------------------------------------------------------------------------------- JSON

// The values of a document by their paths: of {"a": [5, {"b": "c"}]}, a/0 is the number 5 and a/1/b the text c.
class Json {
  public:
    explicit Json(string document) : document_(std::move(document)), at_(document_.c_str()) {
        read("", 0);
        expect(peek() == '\0' && at_ == document_.c_str() + document_.size(), "the end");
    }
    bool has(const string& path) const { return values_.count(path) && values_.at(path).kind != 'n'; }
    bool flag(const string& path, bool absent) const { return has(path) ? values_.at(path).kind == 't' : absent; }
    Int size(const string& path) const { return of(path, '[').size; }
    const string& text(const string& path) const { return of(path, '"').text; }
    string text(const string& path, const string& absent) const { return has(path) ? text(path) : absent; }
    double number(const string& path) const { return std::strtod(of(path, '0').text.c_str(), nullptr); }
    double number(const string& path, double absent) const { return has(path) ? number(path) : absent; }
    double number_or_infinity(const string& path) const {  // for which JSON has no number
        const bool worded = has(path) && (values_.at(path).text == "inf" || values_.at(path).text == "-inf");
        return worded ? (text(path) == "inf" ? HUGE_VAL : -HUGE_VAL) : number(path);
    }
    Int whole(const string& path) const {  // beyond 2^53 a double no longer tells neighbours apart
        const double found = number(path);
        require(found == std::floor(found) && std::abs(found) <= 0x1p53, path, of(path, '0').text, "a whole number");
        return static_cast<Int>(found);
    }
    Ints wholes(const string& path) const {
        Ints found;
        for (Int i = 0; i < size(path); ++i) found.push_back(whole(path + "/" + to_string(i)));
        return found;
    }

  private:
    struct Value {
        char kind;  // { [ " 0 t f n: what it begins with
        string text;
        Int size;
    };
    string document_;
    const char* at_;  // the zero at the document's end is a byte that nothing expects
    std::map<string, Value> values_;

    const Value& of(const string& path, char kind) const {
        require(has(path), path, "absent", string("a value like ") + kind);
        require(values_.at(path).kind == kind, path, "of another type", string("a value like ") + kind);
        return values_.at(path);
    }
    void expect(bool holds, const string& what) { require(holds, "JSON", string(at_, strnlen(at_, 20)), what); }
    char peek() { return *(at_ += std::strspn(at_, " \t\r\n")); }
    void take(char wanted) {
        expect(peek() == wanted, string(1, wanted));
        ++at_;
    }
    void read(const string& path, int depth) {
        Value value{peek(), "", 0};
        if (value.kind == '{' || value.kind == '[') {
            const char close = value.kind == '{' ? '}' : ']';
            expect(depth < 64, "fewer than 64 levels");
            for (take(value.kind); peek() != close; ++value.size) {
                if (value.size) take(',');
                const string name = close == '}' ? read_text() : to_string(value.size);
                if (close == '}') take(':');
                read(path.empty() ? name : path + "/" + name, depth + 1);
            }
            take(close);
        } else if (value.kind == '"') {
            value.text = read_text();
        } else {
            value.text = string(at_, std::strspn(at_, "+-.0123456789aeflnrstuE"));
            if (value.text != "true" && value.text != "false" && value.text != "null") value.kind = '0';
            char* rest = nullptr;
            const double number = std::strtod(value.text.c_str(), &rest);
            expect(value.kind != '0' || (!value.text.empty() && *rest == '\0' && std::isfinite(number)), "a value");
            at_ += value.text.size();
        }
        values_[path] = value;
    }
    string read_text() {
        const string written = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
        string out;
        for (take('"'); *at_ != '"'; ++at_) {
            expect(*at_ != '\0', "the end of a text");
            if (*at_ != '\\') {
                out += *at_;
            } else if (*++at_ == 'u') {
                unsigned code = hex();
                if (code >> 10 == 0x36 && at_[1] == '\\' && at_[2] == 'u')  // the first of a pair
                    at_ += 2, code = 0x10000 + ((code - 0xD800) << 10) + (hex() - 0xDC00);
                const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;  // bytes of UTF-8
                out += static_cast<char>((more ? 0xF00u >> more & 0xF0 : 0) | code >> 6 * more);
                for (int i = more - 1; i >= 0; --i) out += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
            } else {
                expect(*at_ != '\0' && written.find(*at_) != string::npos, "an escape");
                out += meant[written.find(*at_)];
            }
        }
        ++at_;
        return out;
    }
    unsigned hex() {  // from the u to the last of its four digits
        expect(std::strspn(at_ + 1, "0123456789abcdefABCDEF") >= 4, "four digits");
        at_ += 4;
        return static_cast<unsigned>(std::strtoul(string(at_ - 3, 4).c_str(), nullptr, 16));
    }
};

inline string quoted(const string& text) {
    string out = "\"";
    for (const char c : text) {
        char code[8];
        std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c) & 0xFF);
        out += c == '"' || c == '\\' ? string{'\\', c} : (c & 0xE0) == 0 ? code : string{c};
    }
    return out + "\"";
}

// ------------------------------------------------------------------------------------------------------------ frames

struct Request {
    struct Array {
        Ints shape, values;
    };
    Json header;
    std::map<string, Array> arrays;

    Request(const string& text, const string& payload) : header(text) {
        Int at = 0;
        for (Int i = 0; i < header.size("arrays"); ++i) {
            const string path = "arrays/" + to_string(i), name = header.text(path + "/name");
            require(header.text(path + "/dtype") == "int64", name, "of another dtype", "int64: no request has others");
            const Ints shape = header.wholes(path + "/shape");
            double bytes = sizeof(Int);  // a double does not overflow
            for (const Int size : shape) bytes *= size < 0 ? NAN : static_cast<double>(size);
            require(bytes <= static_cast<double>(len(payload) - at), name, "of another size", "what the payload holds");
            Array& array = arrays[name] = {shape, Ints(static_cast<size_t>(bytes) / sizeof(Int))};
            if (bytes > 0) std::memcpy(array.values.data(), payload.data() + at, static_cast<size_t>(bytes));
            at += static_cast<Int>(bytes);
        }
        require(at == len(payload), "arrays", to_string(at) + " bytes", "as many as the payload has");
    }
    bool has(const string& name) const { return arrays.count(name) > 0; }
    const Ints& ints(const string& name, const Ints& shape) const {  // -1 leaves a size open
        require(has(name), name, "absent", "an array");
        const Ints& given = arrays.at(name).shape;
        const auto same = [](Int size, Int wanted) { return wanted < 0 || size == wanted; };
        const bool fits = std::equal(given.begin(), given.end(), shape.begin(), shape.end(), same);
        require(fits, name, "of another shape", "the sizes of the session and of the other arrays");
        return arrays.at(name).values;
    }
};

inline const char* dtype_of(Int) { return "int64"; }
inline const char* dtype_of(float) { return "float32"; }
inline const char* dtype_of(double) { return "float64"; }

// Where the stream is lost, nobody can say where the next frame begins.
inline void survive(bool holds, const char* why) {
    if (holds) return;
    std::fprintf(stderr, "decoder: %s\n", why);
    std::exit(1);
}

class Reply {
  public:
    Reply(const string& key, const string& value) : fields_("{" + quoted(key) + ": " + quoted(value)) {}

    Reply& field(const string& name, const string& json) {
        fields_ += ", " + quoted(name) + ": " + json;
        return *this;
    }
    template <class T>
    Reply& array(const string& name, const Ints& shape, const std::vector<T>& values) {
        string sizes;
        for (const Int size : shape) sizes += (sizes.empty() ? "" : ", ") + to_string(size);
        arrays_ += (arrays_.empty() ? "" : ", ") + ("{\"name\": " + quoted(name)) + ", \"dtype\": \"" + dtype_of(T{});
        arrays_ += "\", \"shape\": [" + sizes + "]}";
        payload_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
        return *this;
    }
    void send() const {
        const string header = fields_ + ", \"arrays\": [" + arrays_ + "]}";
        const std::uint32_t header_bytes = static_cast<std::uint32_t>(header.size());
        const std::uint64_t payload_bytes = payload_.size();
        std::fwrite("EMW1", 1, 4, stdout);
        std::fwrite(&header_bytes, 4, 1, stdout);
        std::fwrite(&payload_bytes, 8, 1, stdout);
        std::fwrite(header.data(), 1, header.size(), stdout);
        std::fwrite(payload_.data(), 1, payload_.size(), stdout);
        survive(std::fflush(stdout) == 0 && !std::ferror(stdout), "nobody reads the replies");
    }

  private:
    string fields_, arrays_, payload_;
};

inline bool read_frame(string& header, string& payload) {  // false at the end of the stream
    char magic[4];
    std::uint32_t header_bytes = 0;
    std::uint64_t payload_bytes = 0;
    const size_t begun = std::fread(magic, 1, 4, stdin);
    if (begun == 0) return false;
    survive(begun == 4 && std::memcmp(magic, "EMW1", 4) == 0, "not a frame of version 1");
    survive(std::fread(&header_bytes, 4, 1, stdin) && std::fread(&payload_bytes, 8, 1, stdin), "a frame ends early");
    survive(header_bytes <= 1u << 24 && payload_bytes <= std::uint64_t{1} << 32, "a frame beyond the limits");
    header.resize(header_bytes), payload.resize(payload_bytes);
    for (string* part : {&header, &payload})
        survive(std::fread(&(*part)[0], 1, part->size(), stdin) == part->size(), "a frame ends early");
    return true;
}

#endif
