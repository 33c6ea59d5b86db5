// FlashAttention of recorded launches, without Python: autograd's node, the buffers and the launches of both passes.
//
// An eager call from Python costs several times as much as what it launches: the Function, its context, the keys of
// recordings, a launcher that parses sixty arguments. Here a way is looked up by what its launches depend on (shapes,
// strides, dtype, device, mask, scale and Python's number of the configuration). Each kernel's parameters lie side by
// side as it reads them; a call copies them, writes the addresses of its tensors into the copy, and launches.
//
// native.py makes the ways from what Triton compiled and launched once. Nothing here is compiled for a device: the two
// functions of the driver are addresses, given by Python, and cuda.h describes what they take.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cuda.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using namespace torch::autograd;

constexpr uintptr_t kAlignment = 16;     // Triton compiled the kernels for such addresses
constexpr size_t kMostBytes = 4096;      // what a kernel may take as parameters
constexpr size_t kMostParameters = 256;
constexpr size_t kMostWays = 512;

decltype(&cuLaunchKernelEx) launch_kernel = nullptr;
decltype(&cuTensorMapReplaceAddress) replace_address = nullptr;

// One kernel, with all its parameters except the addresses of the tensors.
struct Launch {
  CUfunction function;
  std::array<unsigned, 3> grid;
  unsigned threads, shared;
  std::string bytes;                                      // the parameters
  std::vector<uint32_t> places;                           // where each begins in the bytes
  std::vector<std::pair<uint32_t, uint32_t>> addresses;   // a place in the bytes, and the tensor whose address it is
  std::vector<std::pair<uint32_t, uint32_t>> descriptors; // the same of tensor maps

  void run(const uintptr_t* tensors, CUstream stream) const {
    alignas(128) char copy[kMostBytes];
    void* parameters[kMostParameters];
    std::memcpy(copy, bytes.data(), bytes.size());
    for (auto [place, tensor] : addresses) std::memcpy(copy + place, &tensors[tensor], sizeof(uintptr_t));
    for (auto [place, tensor] : descriptors) {
      auto* map = reinterpret_cast<CUtensorMap*>(copy + place);
      TORCH_CHECK(replace_address(map, reinterpret_cast<void*>(tensors[tensor])) == CUDA_SUCCESS,
                  "attention flash: the driver refuses the address of a tensor's descriptor");
    }
    for (size_t i = 0; i < places.size(); ++i) parameters[i] = copy + places[i];
    CUlaunchConfig config{};
    config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
    config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared, config.hStream = stream;
    auto status = launch_kernel(&config, function, parameters, nullptr);
    TORCH_CHECK(status == CUDA_SUCCESS, "attention flash: the driver cannot launch a kernel, error ", int(status));
  }
};

// All that the launches of a call depend on, except addresses.
struct Key {
  std::array<int64_t, 26> words;
  bool operator==(const Key&) const = default;
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t found = 14695981039346656037ull;
    for (auto word : key.words) found = (found ^ uint64_t(word)) * 1099511628211ull, found ^= found >> 29;
    return found;
  }
};

Key key_of(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale, int64_t configuration) {
  Key key{};
  size_t at = 0;
  for (auto size : q.sizes()) key.words[at++] = size;
  for (auto size : k.sizes()) key.words[at++] = size;
  for (const auto* tensor : {&q, &k, &v})
    for (auto stride : tensor->strides()) key.words[at++] = stride;
  key.words[at++] = int64_t(q.scalar_type());
  key.words[at++] = q.device().index();
  key.words[at++] = causal;
  key.words[at++] = std::bit_cast<int64_t>(scale);
  key.words[at++] = configuration;
  return key;
}

struct Way {
  bool causal;
  double scale;
  std::array<std::vector<int64_t>, 3> strides;  // of q, k and v
  std::vector<int64_t> out_strides, gradient_strides, statistics, sums;  // no sums: an empty shape
  std::vector<Launch> forward, backward;
};

std::mutex guard;
std::deque<Way> ways;  // they stay where they are, since backward passes point at them
std::unordered_map<Key, const Way*, Hash> known;

// The addresses of tensors, or nothing if one is not a multiple of 16.
template <size_t N>
std::optional<std::array<uintptr_t, N>> addresses_of(const std::array<const Tensor*, N>& tensors) {
  std::array<uintptr_t, N> found{};
  for (size_t i = 0; i < N; ++i) {
    if (tensors[i] == nullptr) continue;
    found[i] = reinterpret_cast<uintptr_t>(tensors[i]->data_ptr());
    if (found[i] % kAlignment) return std::nullopt;
  }
  return found;
}

bool plain(const Tensor& tensor) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

// Whether somebody follows operators: then backward is one, too.
bool watched() {
  return at::GradMode::is_enabled() || at::hasCallbacks() || c10::impl::TorchDispatchModeTLS::stack_len() > 0;
}

std::array<Tensor, 3> gradients_by_operator(
    const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& logsumexp, bool causal, double scale) {
  static auto found = c10::Dispatcher::singleton()
      .findSchemaOrThrow("stepscope::flash_attention_backward", "")
      .typed<std::tuple<Tensor, Tensor, Tensor>(
          const Tensor&, const std::optional<Tensor>&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
          const Tensor&, bool, double, std::optional<int64_t>, const std::optional<Tensor>&)>();
  auto [dq, dk, dv] =
      found.call(gradient, std::nullopt, q, k, v, out, logsumexp, causal, scale, std::nullopt, std::nullopt);
  return {dq, dk, dv};
}

// The gradients by the recorded launches; nothing where none are known yet, or where they do not hold: a gradient that
// lies in another way, a saved tensor that came back in another layout, an order of sums that must be the same each time.
std::optional<std::array<Tensor, 3>> gradients_by_launches(
    const Way& way, const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& logsumexp, int64_t stream) {
  if (way.backward.empty() || watched() || (!way.sums.empty() && at::globalContext().deterministicAlgorithms())) return std::nullopt;
  for (const auto* tensor : {&gradient, &q, &k, &v, &out, &logsumexp})
    if (!plain(*tensor) || tensor->device() != q.device()) return std::nullopt;
  if (gradient.scalar_type() != q.scalar_type() || gradient.strides() != way.gradient_strides ||
      q.strides() != way.strides[0] || k.strides() != way.strides[1] || v.strides() != way.strides[2] ||
      out.strides() != way.out_strides || !logsumexp.is_contiguous())
    return std::nullopt;
  c10::OptionalDeviceGuard here;
  if (!q.device().is_cpu()) here.reset_device(q.device());
  at::AutoDispatchBelowADInplaceOrView below;
  auto wide = q.options().dtype(at::kFloat);
  std::array<Tensor, 3> made{at::empty_like(q), at::empty_like(k), at::empty_like(v)};
  auto statistics = at::empty(way.statistics, wide);
  auto sums = way.sums.empty() ? Tensor() : at::empty(way.sums, wide);
  auto addresses = addresses_of<11>({&gradient, &q, &k, &v, &out, &logsumexp, &made[0], &made[1], &made[2],
                                     &statistics, sums.defined() ? &sums : nullptr});
  if (!addresses) return std::nullopt;
  for (const auto& launch : way.backward) launch.run(addresses->data(), reinterpret_cast<CUstream>(stream));
  return made;
}

// Nodes of autograd's graph are kept by one kind of pointer or another, by PyTorch's version.
template <class T>
auto made_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>)
    return c10::make_intrusive<T>();
  else
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
}

template <class T>
auto pointer_to(T* node) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>)
    return c10::intrusive_ptr<Node>::unsafe_reclaim_from_nonowning(node);
  else
    return node->shared_from_this();
}

struct FlashAttentionBackward : public Node {
  std::array<SavedVariable, 5> saved;  // q, k, v, out, logsumexp
  const Way* way = nullptr;
  int64_t stream = 0;  // autograd runs backward on the stream of forward

  std::string name() const override { return "FlashAttentionBackward0"; }

  void release_variables() override {
    std::lock_guard<std::mutex> held(mutex_);
    for (auto& each : saved) each.reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> held(mutex_);
    const auto& gradient = gradients[0];
    if (!gradient.defined()) return variable_list(3);
    auto q = saved[0].unpack(), k = saved[1].unpack(), v = saved[2].unpack();
    auto out = saved[3].unpack(pointer_to(this)), logsumexp = saved[4].unpack();
    auto found = gradients_by_launches(*way, gradient, q, k, v, out, logsumexp, stream);
    if (!found) found = gradients_by_operator(gradient, q, k, v, out, logsumexp, way->causal, way->scale);
    return {(*found)[0], (*found)[1], (*found)[2]};
  }
};

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Way* way, int64_t stream) {
  Tensor out, logsumexp;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::OptionalDeviceGuard here;
    if (!q.device().is_cpu()) here.reset_device(q.device());
    out = at::empty_like(q);
    logsumexp = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
    auto addresses = addresses_of<5>({&q, &k, &v, &out, &logsumexp});
    TORCH_INTERNAL_ASSERT(addresses);  // attend looked at those that were given
    for (const auto& launch : way->forward) launch.run(addresses->data(), reinterpret_cast<CUstream>(stream));
  }
  if (compute_requires_grad(q, k, v)) {
    auto node = made_node<FlashAttentionBackward>();
    node->way = way, node->stream = stream;
    node->set_next_edges(collect_next_edges(q, k, v));
    set_history(out, node);
    node->saved = {SavedVariable(q, false), SavedVariable(k, false), SavedVariable(v, false), SavedVariable(out, true),
                   SavedVariable(logsumexp, false)};
  }
  return out;
}

// The output of a call whose launches are known; None of any other, which Python then runs.
std::optional<Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale,
                             int64_t configuration, int64_t stream) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4 || v.sizes() != k.sizes() || k.scalar_type() != q.scalar_type() ||
      v.scalar_type() != q.scalar_type() || k.device() != q.device() || v.device() != q.device())
    return std::nullopt;
  const Way* way;
  {
    std::lock_guard<std::mutex> held(guard);
    auto found = known.find(key_of(q, k, v, causal, scale, configuration));
    if (found == known.end()) return std::nullopt;
    way = found->second;
  }
  if (!addresses_of<3>({&q, &k, &v})) return std::nullopt;
  return attention(q, k, v, way, stream);
}

Launch launch_of(const pybind11::dict& of) {
  Launch launch;
  launch.function = reinterpret_cast<CUfunction>(of["function"].cast<uintptr_t>());
  launch.grid = of["grid"].cast<std::array<unsigned, 3>>();
  launch.threads = of["threads"].cast<unsigned>();
  launch.shared = of["shared"].cast<unsigned>();
  launch.bytes = of["bytes"].cast<std::string>();
  launch.places = of["places"].cast<std::vector<uint32_t>>();
  launch.addresses = of["addresses"].cast<std::vector<std::pair<uint32_t, uint32_t>>>();
  launch.descriptors = of["descriptors"].cast<std::vector<std::pair<uint32_t, uint32_t>>>();
  TORCH_CHECK(launch.bytes.size() <= kMostBytes && launch.places.size() <= kMostParameters, "too many parameters");
  return launch;
}

// Learn the launches of a call, of forward alone or of both passes; false where as many are known as may be.
bool learn(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, bool causal, double scale,
           int64_t configuration, std::vector<int64_t> gradient_strides, std::vector<int64_t> statistics,
           std::vector<int64_t> sums, const std::vector<pybind11::dict>& forward,
           const std::vector<pybind11::dict>& backward) {
  Way way{causal, scale, {q.strides().vec(), k.strides().vec(), v.strides().vec()}, out.strides().vec(),
          std::move(gradient_strides), std::move(statistics), std::move(sums), {}, {}};
  for (const auto& each : forward) way.forward.push_back(launch_of(each));
  for (const auto& each : backward) way.backward.push_back(launch_of(each));
  std::lock_guard<std::mutex> held(guard);
  if (ways.size() >= kMostWays) return false;
  ways.push_back(std::move(way));
  known[key_of(q, k, v, causal, scale, configuration)] = &ways.back();
  return true;
}

void forget() {
  std::lock_guard<std::mutex> held(guard);
  known.clear();
}

void set_driver(uintptr_t launch, uintptr_t replace) {
  launch_kernel = reinterpret_cast<decltype(launch_kernel)>(launch);
  replace_address = reinterpret_cast<decltype(replace_address)>(replace);
}

// What the node keeps, as the nodes of PyTorch's own operators show it.
template <size_t which>
PyObject* raw_saved(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  auto* node = static_cast<FlashAttentionBackward*>(reinterpret_cast<THPCppFunction*>(self)->cdata.get());
  return pybind11::cast(node->saved[which], pybind11::return_value_policy::reference).release().ptr();
  END_HANDLE_TH_ERRORS
}

struct NotFromPython {
  Node* operator()(PyObject*) { throw std::runtime_error("a node of flash attention is made by its forward"); }
};

void show_node() {
  static PyMethodDef methods[] = {
      {"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
      {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
      {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
      {"name", THPCppFunction_name, METH_NOARGS, nullptr},
      {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
      {nullptr}};
  static PyGetSetDef properties[] = {
      {"next_functions", THPCppFunction_next_functions, nullptr, nullptr, nullptr},
      {"requires_grad", THPCppFunction_requires_grad, nullptr, nullptr, nullptr},
      {"metadata", THPCppFunction_metadata, nullptr, nullptr, nullptr},
      {"_input_metadata", THPCppFunction_input_metadata, nullptr, nullptr, nullptr},
      {"_raw_saved_query", raw_saved<0>, nullptr, nullptr, nullptr},
      {"_raw_saved_key", raw_saved<1>, nullptr, nullptr, nullptr},
      {"_raw_saved_value", raw_saved<2>, nullptr, nullptr, nullptr},
      {"_raw_saved_out", raw_saved<3>, nullptr, nullptr, nullptr},
      {"_raw_saved_logsumexp", raw_saved<4>, nullptr, nullptr, nullptr},
      {nullptr}};
  static PyTypeObject type;
  createForwardFunctionPyTypeObject<NotFromPython>(type, "FlashAttentionBackward0", properties, methods);
  registerCppFunction(typeid(FlashAttentionBackward), &type);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  show_node();
  module.def("attend", &attend);
  module.def("learn", &learn);
  module.def("forget", &forget);
  module.def("set_driver", &set_driver);
}
