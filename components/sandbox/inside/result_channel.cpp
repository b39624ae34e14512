// The loop of delivery.HostDelivery: a runner on cpu sends the judge the address of each result, and waits
// until the judge has read the result.
//
// This loop is part of every measurement, with cold caches after each call. In Python it would take time that a
// candidate could save by exchanging the messages in native code of its own (docs/measurements/judge.md).
#include <pybind11/pybind11.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace py = pybind11;

// Sends one message and waits for one byte; ends the process when the judge has closed the connection. The
// interpreter's lock is held meanwhile, because the judge only reads this process's memory.
static void send_and_wait(int descriptor, const void* message, size_t size) {
  send(descriptor, message, size, 0);
  char reply;
  ssize_t count;
  do {
    count = read(descriptor, &reply, 1);
  } while (count < 0 && errno == EINTR);
  if (count <= 0) _exit(0);
}

// Calls object.name() without arguments.
static py::object call_method(py::handle object, py::handle name) {
  PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), name.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Makes one call for each tuple of `arguments` and delivers its result. `tensor` is the type torch.Tensor: a
// result that is one contiguous tensor of exactly that type is delivered here, any other one by the Python
// function `deliver`.
static void calls(int descriptor, py::handle call, py::list arguments, py::handle tensor,
                  py::handle deliver) {
  static const py::handle is_contiguous = PyUnicode_InternFromString("is_contiguous");
  static const py::handle data_ptr = PyUnicode_InternFromString("data_ptr");
  struct {
    char letter[8];
    uint64_t address;
  } message = {"O", 0};
  for (py::handle values : arguments) {
    const auto result = py::reinterpret_steal<py::object>(PyObject_CallObject(call.ptr(), values.ptr()));
    if (!result) throw py::error_already_set();
    if (py::type::handle_of(result).is(tensor) &&
        call_method(result, is_contiguous).is(py::handle(Py_True))) {
      message.address = PyLong_AsUnsignedLongLong(call_method(result, data_ptr).ptr());
      if (PyErr_Occurred()) throw py::error_already_set();
      send_and_wait(descriptor, &message, sizeof message);
    } else {
      deliver(result);
    }
  }  // the result is released here, so that the next call can have its memory
}

PYBIND11_MODULE(result_channel, module) {
  module.def("calls", calls);
  module.def("send_and_wait", [](int descriptor, py::bytes message, int times) {
    const std::string_view text = message;
    for (int i = 0; i < times; ++i) send_and_wait(descriptor, text.data(), text.size());
  });
}
